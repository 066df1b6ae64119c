"""What a recipe refuses, in sentences that name it and its value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe, load_warm_start


def recipe_of(model: nn.Module | None = None, loss: Any = None, **rules: Any) -> Recipe:
    model = model or nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, loss or nn.MSELoss(), **rules)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"clip_grad_norm": "1"}, "clip_grad_norm is '1'; it is a number above 0"),
        ({"clip_grad_value": -1}, "clip_grad_value is -1; it is a number above 0"),
        ({"ema": "0.9"}, "ema is '0.9'; it is a decay"),
        ({"metrics": 5}, "metrics is 5; give a list of names"),
        ({"schedule": "sharp"}, "choose among trials; .* give the backend pick='sharp'"),
        ({"schedule": "oldest_first"}, "give the backend pick='oldest_first'"),
        ({"schedule": "gpipe"}, "shards is 1, and each device is to have a shard at least"),
        (
            {"schedule": "gpipe", "shards": 2, "cut": "modules"},
            "cut is 'modules', which keeps a batch on one device; leave cut out",
        ),
        ({"schedule": "fastest"}, r"'fastest'; it is one of \['sequential', 'gpipe', "),
    ],
)
def test_arguments_of_a_wrong_type(rules, message):
    with pytest.raises(ConfigurationError, match=message):
        recipe_of(**rules)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_gradient_hook_would_not_hop(kind):
    model = nn.Linear(3, 1)
    getattr(model.weight, kind)(lambda tensor: None)
    with pytest.raises(ConfigurationError, match="parameter 'weight' has a gradient hook"):
        recipe_of(model)


class Scaled(nn.Module):
    """Two inputs, of which a table may name but one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * scale


def test_a_column_that_would_go_to_another_argument_than_its_own_is_refused():
    model = Scaled()
    with pytest.raises(ConfigurationError, match="'scale' is another argument there"):
        recipe_of(model).bind(Columns(("scale", "values"), ("y",)))
    assert recipe_of(model).bind(Columns(("values", "scale"), ("y",))).call.names is None
    assert recipe_of(model).bind(Columns(("scale", "x"), ("y",))).call.names == ("scale", "x")


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.HuberLoss(), F.l1_loss])
@pytest.mark.parametrize("weight", [None, "w"])
def test_rows_compared_with_every_other_row_are_refused(loss, weight):
    recipe = recipe_of(loss=loss).bind(Columns(("x",), ("y",), weight))
    outputs, targets = torch.zeros(4, 1), (torch.zeros(4), torch.ones(4))[: 2 if weight else 1]
    with pytest.raises(ConfigurationError, match=r"shape \(4, 1\) and the labels have \(4,\)"):
        recipe.compute_loss(outputs, targets)
    assert recipe.compute_loss(outputs.squeeze(1), targets).item() == 0
    assert recipe.compute_loss(outputs[:1], [t[:1] for t in targets]).item() == 0


def test_class_numbers_and_probabilities_are_no_broadcast():
    recipe = recipe_of(loss=nn.CrossEntropyLoss()).bind(Columns(("x",), ("y",)))
    recipe.compute_loss(torch.zeros(4, 4), (torch.zeros(4, dtype=torch.int64),))
    recipe.compute_loss(torch.zeros(4, 4), (torch.zeros(4, 4),))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (
            torch.ones(1, 3, dtype=torch.int64),
            "weight as torch.int64, the model's is torch.float32",
        ),
        ([[1.0, 2.0, 3.0]], "warm_start has a list for weight"),
    ],
)
def test_a_warm_start_of_another_kind(weight, message):
    with pytest.raises(ConfigurationError, match=message):
        load_warm_start(nn.Linear(3, 1), {"weight": weight, "bias": torch.ones(1)})


class Keywords(nn.Module):
    """It takes whatever columns there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch["x"])


def test_a_forward_of_keywords_gets_every_column_by_name():
    recipe = recipe_of(Keywords()).bind(Columns(("x",), ("y",)))
    assert recipe.call(recipe.model, [torch.zeros(2, 3)]).shape == (2, 1)
    own = recipe_of(Keywords(), loss="model").bind(Columns(("x",), ("y",)))
    assert own.call.names == ("x", "y")


class Precomputed(nn.Module):
    """It keeps what it computed from its weight when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.turned = self.layer.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: torch.jit.script(nn.Linear(3, 1)), "the model is a ScriptModule.* before torch.j"),
        (
            lambda: nn.Sequential(torch.jit.trace(nn.Linear(3, 1), torch.zeros(2, 3))),
            "module '0' is a ScriptModule",
        ),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "module '0' is a LazyLinear without a size"),
        (
            lambda: nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d(affine=False)),
            "module '1' is a LazyBatchNorm1d without a size",
        ),
        (Precomputed, "attribute 'turned' of the model was computed from parameters"),
        (dict, "model is a dict; give a torch.nn.Module"),
    ],
)
def test_models_that_no_worker_could_train(model, message):
    optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=message):
        Recipe(model(), optimizer, nn.MSELoss())


class Extras(nn.Module):
    """It takes a column of its own and gives the others to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * others.get("scale", 1.0)


def test_columns_without_an_argument_go_into_keywords():
    assert recipe_of(Extras()).bind(Columns(("x", "scale"), ("y",))).call.names == ("x", "scale")
    own = recipe_of(Extras(), loss="model").bind(Columns(("x",), ("labels",)))
    assert own.call.names == ("x", "labels")
    assert recipe_of(Extras()).bind(Columns(("values",), ("y",))).call.names is None
