"""What a recipe refuses, in sentences that name it and its value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.recipe import Columns, Recipe, load_warm_start
from tests.golden import assert_golden, refusal
from tests.recipe.small_recipes import recipe_of


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


class Keywords(nn.Module):
    """It may take a column of its own, and takes whatever others there are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch["x"])


class Extras(Keywords):
    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * others.get("scale", 1.0)


def test_columns_without_an_argument_go_into_keywords_by_name():
    recipe = recipe_of(Keywords()).bind(Columns(("x",), ("y",)))
    assert recipe.call(recipe.model, [torch.zeros(2, 3)]).shape == (2, 1)
    own = recipe_of(Keywords(), loss="model").bind(Columns(("x",), ("y",)))
    assert own.call.names == ("x", "y")
    assert recipe_of(Extras()).bind(Columns(("x", "scale"), ("y",))).call.names == ("x", "scale")
    own = recipe_of(Extras(), loss="model").bind(Columns(("x",), ("labels",)))
    assert own.call.names == ("x", "labels")
    assert recipe_of(Extras()).bind(Columns(("values",), ("y",))).call.names is None


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


class Precomputed(nn.Module):
    """It keeps what it computed from its weight when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.turned = self.layer.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned


HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def hooked(kind: str) -> nn.Module:
    """A model whose gradient hook would not hop."""
    model = nn.Linear(3, 1)
    getattr(model.weight, kind)(lambda tensor: None)
    return model


RULES: dict[str, tuple[Any, ...]] = {
    "clip_grad_norm": ("1",),
    "clip_grad_value": (-1,),
    "autocast": ("float8",),
    "grad_scaler": (torch.amp.GradScaler("cpu"),),
    "ema": ("0.9",),
    "optimizer_on": ("cpu",),
    "metrics": (5,),
    "schedule": ("sharp", "oldest_first", "gpipe", "fastest"),
    "stages": (1, True, [3], [2, 0], 2.0, "all", 2),
}
SCALERS: dict[str, Any] = {
    "a number": 65536.0,
    "disabled": torch.amp.GradScaler("cpu", enabled=False),
    "without a scale": torch.amp.GradScaler("cpu", init_scale=0.0),
    "of a class of its own": type("Own", (torch.amp.GradScaler,), {})("cpu"),
}


def with_sparse(register: Callable[..., None]) -> nn.Module:
    model, matrix = nn.Sequential(nn.Linear(3, 1)), torch.eye(3).to_sparse()
    parameter = register is nn.Module.register_parameter
    register(model[0], "matrix", nn.Parameter(matrix) if parameter else matrix)
    return model


def with_view(view: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 1))
    model[0].register_buffer("phases", view)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "scripted": lambda: torch.jit.script(nn.Linear(3, 1)),
    "with a traced module": lambda: nn.Sequential(
        torch.jit.trace(nn.Linear(3, 1), torch.zeros(2, 3))
    ),
    "with a lazy layer": lambda: nn.Sequential(nn.LazyLinear(2)),
    "with a lazy norm": lambda: nn.Sequential(nn.Linear(3, 2), nn.LazyBatchNorm1d(affine=False)),
    "with a sparse parameter": partial(with_sparse, nn.Module.register_parameter),
    "with a sparse buffer": partial(with_sparse, nn.Module.register_buffer),
    "with a conjugated buffer": lambda: with_view(torch.ones(2, dtype=torch.cfloat).conj()),
    "with a negated buffer": lambda: with_view(torch._neg_view(torch.ones(2))),
    "with a computed attribute": Precomputed,
    "that is none": dict,
    **{f"with {kind}": partial(hooked, kind) for kind in HOOKS},
}
WARM_STARTS = {"integers": torch.ones(1, 3, dtype=torch.int64), "a list": [[1.0, 2.0, 3.0]]}


def unusual(make: Callable[[], Any]) -> Recipe:
    model = make()
    parameters = model.parameters() if hasattr(model, "weight") else nn.Linear(3, 1).parameters()
    return Recipe(model, torch.optim.SGD(parameters, lr=0.1), nn.MSELoss())


def _shown(value: Any) -> str:
    return type(value).__name__ if isinstance(value, torch.amp.GradScaler) else repr(value)


def test_rules_models_and_weights_that_no_worker_could_train_with() -> None:
    uses: dict[str, Callable[[], object]] = {
        **{
            f"{name} = {_shown(value)}": partial(recipe_of, **{name: value})
            for name, values in RULES.items()
            for value in values
        },
        "schedule = 'gpipe', cut = 'modules'": partial(
            recipe_of, schedule="gpipe", cut="modules", shards=2
        ),
        "schedule = 'pipedream', clip_grad_norm = 1.0": partial(
            recipe_of, schedule="pipedream", clip_grad_norm=1.0
        ),
        "schedule = 'pipedream', accumulate = 4": partial(
            recipe_of, schedule="pipedream", accumulate=4
        ),
        "schedule = '2bw', vertical_sync = True": partial(
            recipe_of, schedule="2bw", vertical_sync=True
        ),
        "shards = 2, stages = 3": partial(recipe_of, schedule="gpipe", shards=2, stages=3),
        "shards = 2, stages = [1, 2]": partial(
            recipe_of, schedule="gpipe", shards=2, stages=[1, 2]
        ),
        "vertical_sync = 1": partial(recipe_of, schedule="pipedream", vertical_sync=1),
        **{
            f"schedule = {schedule!r}, autocast = 'float16'": partial(
                recipe_of, schedule=schedule, autocast="float16"
            )
            for schedule in ("pipedream", "2bw")
        },
        **{
            f"a grad_scaler: {what}": partial(recipe_of, autocast="float16", grad_scaler=given)
            for what, given in SCALERS.items()
        },
        "float16 of half a model": partial(recipe_of, nn.Linear(3, 1).half(), autocast="float16"),
        **{f"a model {what}": partial(unusual, make) for what, make in MODELS.items()},
        **{
            f"a warm start of {what}": partial(
                load_warm_start, nn.Linear(3, 1), {"weight": weight, "bias": torch.ones(1)}
            )
            for what, weight in WARM_STARTS.items()
        },
        "a warm start of a number": partial(load_warm_start, nn.Linear(3, 1), 3),
    }
    found = {what: refusal(use) for what, use in uses.items()}
    assert_golden(Path(__file__).with_name("golden") / "refused_recipes.txt", found)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (3, "an int"),
        (object(), "an object"),
        ([], "a list"),
        (None, "a NoneType"),
        (nn.LSTM(1, 1), "an LSTM"),
        (nn.MSELoss(), "an MSELoss"),
        (nn.GRU(1, 1), "a GRU"),
        (nn.Embedding(1, 1), "an Embedding"),
        (nn.Linear(1, 1), "a Linear"),
    ],
)
def test_an_error_names_the_type_of_a_value_with_its_article(value: object, told: str) -> None:
    assert kind_of(value) == told
