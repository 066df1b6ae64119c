"""Reports of admission say why a cut lies where it does, and where an uncuttable model differs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.cut.model import CutModelCache
from tests.shards import zoo
from tests.shards.engine.test_shards_equivalence import mlp_recipe, two_sub_epochs
from tests.shards.hopping import start


class Branches(nn.Module):
    """It is another function while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)))
        return self.c(torch.sigmoid(y) if type(y) is torch.Tensor else y)


class Counts(nn.Module):
    """It counts its training steps in an attribute, which no hop would carry."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        return self.b(self.a(x) * (1 + self.calls if self.training else 1))


def recipe_of(model, **rules) -> Recipe:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), **rules)


def examples(*rows):
    return [(b.features, b.labels) for b in zoo.vectors(*rows)]


def test_the_first_operation_that_differs_is_named():
    torch.manual_seed(0)
    admission = admit(recipe_of(Branches(), shards=3, cut="export"), examples(8, 5), 1)
    assert admission.spec.mode == "modules"
    why = admission.report.text()
    assert "the first operation whose output differs is aten.sigmoid.default in 'b'" in why
    assert "whose output is float32[8, 6], in step 0" in why


class Draws(nn.Module):
    """Its random numbers come from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.a(x) + torch.rand(x.shape[0], 1, generator=self.generator)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(("kind", "attribute"), [(Counts, "calls"), (Draws, "generator")])
def test_a_model_with_a_state_that_would_not_hop_is_refused(kind, attribute, shards):
    torch.manual_seed(0)
    message = f"each step changes attribute '{attribute}' of the model .* no part of the state"
    with pytest.raises(ConfigurationError, match=message):
        admit(recipe_of(kind(), shards=shards), examples(8), 1)


def test_a_cut_by_number_says_what_share_of_the_time_each_shard_takes():
    report = start(mlp_recipe(shards=3)(), two_sub_epochs()[0]).admission.report
    shares = [int(shard.why.split("%")[0]) for shard in report.shards]
    assert 98 <= sum(shares) <= 102
    assert all("of a step's measured time" in shard.why for shard in report.shards)


def test_a_cut_by_name_says_which_name():
    report = start(mlp_recipe(shards=["3", "6"])(), two_sub_epochs()[0]).admission.report
    assert [s.why for s in report.shards] == [
        "it begins the model", "'3' was named", "'6' was named"
    ]  # fmt: skip
    assert "('3' was named)" in report.text()


def test_shards_may_be_lists_of_blocks():
    named = mlp_recipe(shards=[["0", "1"], ["3"], ["6", "8"]])()
    report = start(named, two_sub_epochs()[0]).admission.report
    assert [s.first_unit for s in report.shards] == ["0", "3", "6"]
    torch.manual_seed(0)
    model = zoo.mlp()
    recipe = recipe_of(model, shards=[[model[0]], [model[3], model[6]]])
    report = start(recipe, two_sub_epochs()[0]).admission.report
    assert [s.first_unit for s in report.shards] == ["0", "3"]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([["0", "6"], ["3"]], r"puts '6' into shard 0, but the model runs it elsewhere.*'0', '1'"),
        ([["0"], []], "shard 1 of shards has no block"),
        ([["0"], "3"], "mixes names and lists"),
        ([["0"], ["nose"]], "'nose', which is no module"),
        ("Auto", "'Auto', which is no module of the model; give 'auto', a number, or"),
        ([["0"], [nn.Linear(1, 1)]], "a Linear that is no module of the model"),
        (2.5, r"shards is 2\.5; give a number"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(shards, message):
    with pytest.raises(ConfigurationError, match=message):
        start(mlp_recipe(shards=shards)(), two_sub_epochs()[0])


def test_equal_models_are_measured_once_and_cut_alike():
    cache = CutModelCache()
    specs = set()
    for _ in range(4):
        trial = start(mlp_recipe(shards=3)(), two_sub_epochs()[0], cache=cache)
        specs.add(trial.admission.spec)
    assert len(specs) == 1
    assert len(cache._times) == 1


class Recurrent(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        self.cell = kind(6, 8, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.cell(x.unsqueeze(1))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_equal_recurrent_models_share_their_trace(kind):
    cache = CutModelCache()
    for _ in range(2):
        admit(recipe_of(Recurrent(kind), shards=2, cut="export"), examples(8), 1, cache)
    assert len(cache._traces) == 1
