"""Cuts of models: where they lie, what each shard holds, and when shards come and go."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe
from cerebro_hydra.shards.admission.admit import CutReport, admit
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.cut.spec import CutSpec
from cerebro_hydra.shards.cut.values import AttributeValues
from cerebro_hydra.shards.engine import module_tasks
from cerebro_hydra.shards.engine.optimizer import StateTemplate
from cerebro_hydra.testing.model_case import assert_same_state
from tests.shards import plain, zoo
from tests.shards.cut.test_shards_cut_models import Named
from tests.shards.executors.executor_case import assert_equal_to_plain
from tests.shards.hopping import STEPS_PER_EPOCH, Trial, owned, start
from tests.shards.trials import mlp_recipe, seeded, two_sub_epochs


def reported(shards, **rules) -> CutReport:
    return start(mlp_recipe(shards=shards, **rules)(), two_sub_epochs()[0]).admission.report


@pytest.mark.parametrize("cut", ["modules", "export"])
def test_more_shards_than_units_are_clamped_and_the_report_says_so(cut):
    report = reported(50, cut=cut)
    assert len(report.shards) == 4, "a shard without parameters is nothing but overhead"
    assert "50 shards were asked for" in report.text()


def test_a_balanced_cut_isolates_the_heaviest_layer():
    def build():
        return nn.Sequential(
            nn.Linear(6, 999), nn.ReLU(), nn.Linear(999, 999), nn.Linear(999, 99), nn.Linear(99, 3)
        )

    trial = start(seeded(build, 3)(), two_sub_epochs()[0])
    assert owned(trial, 1) == ("2.weight", "2.bias")


def test_the_report_counts_what_each_shard_holds_and_receives():
    report = reported(["3"], cut="export")
    first, second = report.shards
    assert (first.first_unit, first.last_unit) == ("0", "2")
    assert (second.first_unit, second.last_unit) == ("3", "8")
    assert first.trainable_params == 6 * 16 + 16
    assert first.receives == ()
    (value,) = second.receives
    assert (value.dtype, value.shape, value.nbytes) == ("float32", (None, 16), 8 * 16 * 4)
    assert report.fallback is None


def test_a_cut_by_number_says_what_share_of_the_time_each_shard_takes():
    report = reported(3)
    shares = [int(shard.why.split("%")[0]) for shard in report.shards]
    assert 98 <= sum(shares) <= 102
    assert all("of a step's measured time" in shard.why for shard in report.shards)


def test_a_cut_by_name_says_which_name():
    report = reported(["3", "6"])
    why = ["it begins the model", "'3' was named", "'6' was named"]
    assert [shard.why for shard in report.shards] == why
    assert "('3' was named)" in report.text()


def test_shards_may_be_lists_of_blocks_and_are_named_by_any_name():
    assert first_units(reported([["0", "1"], ["3"], ["6", "8"]])) == ["0", "3", "6"]
    model = zoo.mlp()
    blocks = [[model[0]], [model[3], model[6]]]
    assert first_units(reported(blocks, model=lambda: model)) == ["0", "3"]
    named = reported(["again.2", "last"], model=lambda: Named(outside_first=False))
    assert first_units(named) == ["body.0", "body.2", "last"]


def first_units(report: CutReport) -> list[str]:
    return [shard.first_unit for shard in report.shards]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 8, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.cell(x.unsqueeze(1))[0][:, -1])


@pytest.mark.parametrize(
    "make",
    [
        mlp_recipe(shards=3),
        seeded(Recurrent, cut="export"),
    ],
    ids=["measured once", "LSTM"],
)
def test_equal_models_are_cut_alike_and_share_what_was_cut(make):
    cache = CutModelCache()
    trials = [start(make(), two_sub_epochs()[0], cache=cache) for _ in range(4)]
    assert len({trial.admission.spec for trial in trials}) == 1
    assert len({id(trial.cut_model) for trial in trials}) == 1


def test_a_model_that_writes_into_its_input_is_cut_by_modules():
    def build():
        return nn.Sequential(nn.Hardtanh(-0.5, 0.5, inplace=True), *zoo.mlp())

    def sub_epochs():
        return [zoo.singly(zoo.vectors(8, 5)), zoo.singly(zoo.vectors(8, seed=1))]

    make = seeded(build, 3, cut="export")
    reference = make()
    _, training = plain.train(reference, sub_epochs())
    trial = start(make(), [w for s in sub_epochs() for w in s])
    assert trial.admission.spec.mode != "export"
    assert "writes into its own input" in trial.admission.report.fallback
    for windows in sub_epochs():
        trial.train(windows)
    assert_same_state(trial.tensors(), training)


def test_admission_changes_neither_model_nor_optimizer():
    recipe = mlp_recipe(lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1))()
    before = plain.everything(recipe)
    groups = repr(recipe.optimizer.param_groups)
    start(recipe, two_sub_epochs()[0])
    assert plain.everything(recipe) == before
    assert repr(recipe.optimizer.param_groups) == groups
    assert recipe.model.training


def test_spec_and_template_travel_as_json():
    recipe = mlp_recipe()()
    features = [(b.features, b.labels) for b in zoo.vectors(8)]
    admission = admit(recipe, features, 1)
    for value, cls in ((admission.spec, CutSpec), (admission.template, StateTemplate)):
        assert cls.from_json(json.loads(json.dumps(value.to_json()))) == value


class FixedRows(zoo.Pair):
    """Counts rows in Python, so an exported graph is right for one number of rows only."""

    def forward(self, x):
        return self.b(self.a(x) * float(sum(1 for _ in range(x.shape[0]))))


def test_a_model_that_fixes_the_number_of_rows_has_a_graph_for_each():
    sub_epochs = [zoo.singly(zoo.vectors(8, 5)), zoo.singly(zoo.vectors(1, 8, seed=1))]
    trial = assert_equal_to_plain(seeded(FixedRows), sub_epochs)
    assert trial.admission.spec == CutSpec("export", ("b@0",), rows=(8, 5, 1))
    assert trial.evaluate(zoo.vectors(5)).sums["loss"][1] == 5
    advice = "cut for .* alone; let it take any .*schedule='sequential' with cut='modules'"
    with pytest.raises(ConfigurationError, match=f"has 7 rows, and the model was {advice}"):
        trial.evaluate(zoo.vectors(7))


def test_a_model_that_fixes_the_number_of_rows_has_graphs_for_evaluations_too():
    examples = [(batch.features, batch.labels) for batch in zoo.vectors(8, 5)]
    fixed, any_rows = seeded(FixedRows, cut="export")(), seeded(zoo.Pair, cut="export")()
    assert admit(fixed, examples, 1, evaluated_rows={8, 3}).spec.rows == (8, 5, 3)
    assert admit(any_rows, examples, 1, evaluated_rows={8, 3}).spec.rows == ()


class Late(zoo.Pair):
    """Some of its parameters have a gradient only when it is told."""

    def add(self):
        self.vector, self.matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 2))
        self.told = False

    def forward(self, x):
        y = self.b(self.a(x))
        return y + self.vector * self.matrix.sum(1) if self.told else y


@pytest.mark.parametrize("kind", ["Adafactor", "Adagrad", "Adam", "Rprop"])
def test_a_first_gradient_may_come_after_admission(kind):
    optimizer = getattr(torch.optim, kind)
    make = mlp_recipe(lambda model: optimizer(model.parameters(), lr=0.1), 2, Late)
    reference = make()
    trial = start(make(), two_sub_epochs()[0])
    training = PlainTrainer(reference, plain.TRIAL_SEED, STEPS_PER_EPOCH)
    for told in (False, True):
        reference.model.told = trial.recipe.model.told = told
        training.train(zoo.singly(zoo.vectors(8, 5)))
        trial.train(zoo.singly(zoo.vectors(8, 5)))
    assert_same_state(trial.tensors(), training)


class Wrapped(nn.Module):
    """Gives a language model whatever else it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.language = zoo.Language()
        self.language.gpt.config.use_cache = True

    def forward(self, input_ids, **others):
        return self.language.gpt(input_ids, **others)


def test_a_cache_behind_keywords_is_off_while_the_recipe_computes():
    torch.manual_seed(0)
    model = Wrapped()
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), "model", shards=2)
    recipe.bind(Columns(("input_ids", "attention_mask"), ("labels",)))
    tokens = zoo.tokens(4)[0].features[0]
    example = ((tokens, torch.ones_like(tokens)), (tokens,))
    with recipe.precision():
        assert recipe.call(recipe.model, recipe.inputs(*example)).past_key_values is None
    assert recipe.model.language.gpt.config.use_cache is True
    assert len(admit(recipe, [example], 1).report.shards) == 2


def test_a_cache_is_off_in_every_config_that_the_model_has_for_a_while():
    model = Wrapped()
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), "model")
    own, others = model.language.gpt.config, AttributeValues(model)
    for _ in range(2):
        with others.in_use(), recipe.precision():
            config = model.language.gpt.config
            assert config is own and config.use_cache is False
        with recipe.precision():
            assert own.use_cache is False
    assert own.use_cache is config.use_cache is True


def trial_of(model: nn.Module, shards=2, mode="keep") -> Trial:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=shards, cut="modules")
    return start(recipe, zoo.singly(zoo.vectors(8, 8)), mode)


class Notes(nn.Module):
    """Calls a function of its class when its forward runs."""

    @staticmethod
    def note(module: nn.Module) -> None:
        """Nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        self.note(self)
        return torch.tanh(self.layer(x))


def test_a_shard_is_needed_when_the_forward_enters_it_and_leaves_after_its_last_backward(
    monkeypatch: pytest.MonkeyPatch,
):
    trial = trial_of(nn.Sequential(Notes(), Notes(), nn.Linear(6, 3)), shards=["1", "2"])
    assert trial.cut_model.num_shards == 3
    number = {module: number for number, module in enumerate(trial.recipe.model)}
    logger, handler = logging.getLogger(__name__), logging.Handler()  # which holds no state
    monkeypatch.setattr(handler, "emit", lambda record: trial.events.append(record.getMessage()))
    monkeypatch.setattr(logger, "handlers", [handler])
    note = staticmethod(lambda module: logger.warning(f"runs{number[module]}"))
    monkeypatch.setattr(Notes, "note", note)
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
    with pytest.raises(StepDiffers, match="is used outside of its own shard"):
        trial.train(two_sub_epochs()[0])


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
