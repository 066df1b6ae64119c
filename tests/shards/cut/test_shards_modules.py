"""A model cut by modules runs its own forward; shards come and go at its boundaries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.engine import module_tasks
from tests.shards import zoo
from tests.shards.engine.test_shards_equivalence import mlp_recipe, two_sub_epochs
from tests.shards.hopping import Trial, start


def trial_of(model: nn.Module, shards=2, mode="keep") -> Trial:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards, cut="modules")
    return start(recipe, zoo.singly(zoo.vectors(8, 8)), mode)


class Notes(nn.Module):
    """Calls a function when its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.note = lambda: None

    def forward(self, x):
        self.note()
        return torch.tanh(self.layer(x))


def test_a_shard_is_needed_when_the_forward_enters_it_and_leaves_after_its_last_backward():
    trial = trial_of(nn.Sequential(Notes(), Notes(), nn.Linear(6, 3)), shards=["1", "2"])
    assert trial.cut_model.num_shards == 3
    for number in range(2):
        note = lambda number=number: trial.events.append(f"runs{number}")  # noqa: E731
        trial.recipe.model[number].note = note
    trial.train(zoo.singly(zoo.vectors(8)))
    assert trial.events == [
        "need0", "runs0", "need1", "runs1", "need2", "publish2", "publish1", "publish0",
    ]  # fmt: skip


def test_the_model_has_its_own_tensors_again_after_training():
    trial = trial_of(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    before = {n: (t, t.clone()) for n, t in trial.recipe.model.state_dict(keep_vars=True).items()}
    trial.train(zoo.singly(zoo.vectors(8, 8)))
    trial.evaluate(zoo.vectors(8))
    after = trial.recipe.model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        own, value = before[name]
        assert tensor is own and torch.equal(tensor, value) and tensor.grad is None


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_an_update_that_comes_before_the_backward_is_over_is_seen(mode, monkeypatch):
    """The negative control of the hooks that tell that a shard's backward is over."""

    class TooEarly(module_tasks.ModuleTasks):
        def _go_backward(self, shard: int) -> None:
            super()._go_backward(max(0, shard - 1))

    trial = start(mlp_recipe(cut="modules")(), two_sub_epochs()[0], mode)
    trial.train(two_sub_epochs()[0])
    monkeypatch.setattr("cerebro_hydra.shards.engine.sub_epoch.ModuleTasks", TooEarly)
    with pytest.raises(StepDiffers, match="got a gradient after the update of its shard"):
        trial.train(two_sub_epochs()[0])


class WritesLate(nn.Module):
    """Writes to a buffer only when it is told to, by value or by another tensor."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(1), persistent)
        self.how = ""

    def forward(self, x):
        if self.how == "value":
            self.seen.data += 1
        elif self.how == "version":
            self.seen.add_(1)
        elif self.how == "other":
            self.seen = self.seen + 1
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("persistent", "how"),
    [(True, "value"), (True, "version"), (True, "other"), (False, "version"), (False, "other")],
)
def test_a_buffer_that_is_written_only_later_is_an_error(persistent, how):
    trial = trial_of(WritesLate(persistent))
    content, _ = trial.need(0)
    frozen = content["frozen"].copy()
    trial.train(zoo.singly(zoo.vectors(8)))
    trial.recipe.model.how = how
    with pytest.raises(ConfigurationError, match="wrote to buffer 'seen'"):
        trial.train(zoo.singly(zoo.vectors(8)))
    assert (trial.need(0)[0]["frozen"] == frozen).all(), "other trials share these bytes"


class OverwritesLate(nn.Module):
    """Writes into the input of a layer behind it, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 3)
        self.spoil = False

    def forward(self, x):
        x = self.a(x) * 2
        y = self.b(x)
        if self.spoil:
            x.mul_(3)
        return self.c(y)


def test_a_unit_whose_input_was_overwritten_is_not_run_again():
    trial = trial_of(OverwritesLate(), shards=["c"], mode="recompute")
    trial.train(zoo.singly(zoo.vectors(8)))
    trial.recipe.model.spoil = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trial.train(zoo.singly(zoo.vectors(8)))


class KeepsKeys(nn.Module):
    """Adds its input to a cache, as attention with a cache of keys does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, cache):
        cache.keys.append(self.layer(x))
        return torch.stack(cache.keys).sum(0)


class KeyCache:
    """Holds the keys of one forward."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []


class Decoder(nn.Module):
    """Hands one cache to all of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([KeepsKeys(), KeepsKeys(), KeepsKeys()])
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        cache = KeyCache()
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x)


def test_units_that_change_an_object_that_they_are_given_are_cut_and_not_run_again():
    trial = trial_of(Decoder(), shards=["layers.1", "layers.2"], mode="recompute")
    assert trial.cut_model.num_shards == 3, trial.admission.report.text()
    assert set(trial.admission.spec.overwritten) == {f"layers.{i}@0" for i in range(3)}


class CallsByName(nn.Module):
    """Calls the forward of its layers, so that no hook of them runs, as SqueezeBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5)])
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer.forward(x)
        return self.last(x)


def test_a_layer_whose_forward_is_called_by_name_draws_no_other_numbers():
    report = trial_of(CallsByName(), mode="recompute").admission.report
    assert len(report.shards) == 2, report.text()


def test_another_way_to_cut_is_refused():
    with pytest.raises(ConfigurationError, match=r"cut is 'layers'; it is one of \['export', "):
        mlp_recipe(cut="layers")()
