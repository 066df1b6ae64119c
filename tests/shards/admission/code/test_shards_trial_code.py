"""The code of a trial is described alike in every process, and what differs has a name."""

from __future__ import annotations

import argparse
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.trial_code import TrialCode, stable_differences, trial_code
from tests.processes import run_python
from tests.shards.admission.code import coded_models
from tests.shards.admission.code.coded_models import FACTORIES, described, net, recipe

MODULE = "tests.shards.admission.code.coded_models"


def elsewhere(seed: int, *arguments: str) -> dict[str, TrialCode]:
    """Return what another process says of every factory."""
    done = run_python("-m", MODULE, *arguments, PYTHONHASHSEED=str(seed))
    told = json.loads(done.stdout.splitlines()[-1])
    return {name: TrialCode.from_json(code) for name, code in told.items()}


@pytest.mark.parametrize(("seed", "arguments"), [(1, ()), (2, ("pickled",))])
def test_a_factory_that_is_the_same_has_the_same_code_in_every_process(
    seed: int, arguments: tuple[str, ...]
) -> None:
    there = elsewhere(seed, *arguments)
    assert there.keys() == {factory.__name__ for factory in FACTORIES}
    for factory in FACTORIES:
        then, first = there[factory.__name__], factory()
        now, again = trial_code(first), described(factory)
        assert now is not None
        assert then.versions == now.versions
        if factory is not coded_models.unlike:
            assert then.parts == now.parts, factory.__name__
        assert stable_differences(then, now, again) == []


def test_what_other_trials_have_changed_in_a_shared_object_is_no_other_code() -> None:
    then = described(coded_models.unlike)
    coded_models.SHARED.calls += 3
    first, second = coded_models.unlike(), coded_models.unlike()
    now, again = trial_code(first), trial_code(second)
    assert now is not None and again is not None
    assert "loss" in {each.part for each in then.differences(now)}
    assert stable_differences(then, now, again) == []


def smoothed(outputs: Any, labels: Any) -> Any:
    return functional.cross_entropy(outputs, labels, label_smoothing=0.1)


def by_lr(lr: float, **options: Any) -> Recipe:
    model = net()
    return recipe(model, optimizer=torch.optim.Adam(model.parameters(), lr=lr, **options))


def frozen() -> Recipe:
    model = net()
    model[0].weight.requires_grad_(False)
    return recipe(model)


def by_sgd() -> Recipe:
    model = net()
    return recipe(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))


def tanh() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: recipe(tanh()), ["the ReLU modules of the model, which it has no more",
                                  "the Tanh modules of the model, which it did not have"]),
        (lambda: recipe(net(nn.Dropout())), ["the Dropout modules of the model, which it did not"]),
        (frozen, ["which parameters of the model train"]),
        (by_sgd, ["the class of the optimizer, SGD and not Adam"]),
        (lambda: by_lr(0.05), ["the optimizer's lr, 0.05 and not 0.01"]),
        (lambda: by_lr(0.01, amsgrad=True), ["the optimizer's amsgrad, True and not False"]),
        (lambda: recipe(loss=nn.CrossEntropyLoss(label_smoothing=0.1)), ["loss"]),
        (lambda: recipe(loss=smoothed), ["loss"]),
        (lambda: recipe(batch_size=8), ["batch_size, 8 and not 32"]),
        (lambda: recipe(metrics=["accuracy"]), ["metrics, ['accuracy'] and not []"]),
        (lambda: recipe(ema=0.9), ["ema, 0.9 and not None"]),
        (lambda: recipe(accumulate=2), ["accumulate, 2 and not 1"]),
        (lambda: recipe(clip_grad_norm=0.1), ["clip_grad_norm, 0.1 and not None"]),
        (lambda: recipe(collate=lambda batch, training: batch), ["collate, "]),
    ],
)  # fmt: skip
def test_what_is_another_one_has_a_name(other: Callable[[], Recipe], told: list[str]) -> None:
    found = [str(each) for each in described(recipe).differences(described(other))]
    for line in told:
        assert any(each.startswith(line) for each in found), found
    assert not [each for each in found if "optimizer's betas" in each], "SGD has none"


class Held(nn.Sequential):
    """Has something beside its layers."""

    def __init__(self, **held: Any) -> None:
        super().__init__(nn.Linear(8, 16), nn.Linear(16, 3))
        vars(self).update(held)


class Attributes(dict[str, Any]):
    """Is a dict with attributes, as configurations are."""


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


def nested(value: float) -> dict[str, Any]:
    return {"a": {"b": {"c": {"d": {"e": value}}}}}


VALUES: dict[str, Callable[[float], Any]] = {
    "number": lambda v: {"drop_path_rate": v},
    "namespace": lambda v: {"args": argparse.Namespace(scale=v)},
    "simple namespace": lambda v: {"args": SimpleNamespace(scale=v)},
    "dict": lambda v: {"config": Attributes(scale=v)},
    "nested": lambda v: {"config": nested(v)},
    "slots": lambda v: {"config": Slotted(v)},
    "array": lambda v: {"scale": np.float32(v)},
    "range": lambda v: {"steps": range(int(v))},
}


@pytest.mark.parametrize("kind", VALUES)
def test_other_values_of_the_users_modules_are_told_and_are_no_other_code(kind: str) -> None:
    held = VALUES[kind]
    then, now = (described(lambda v=v: recipe(Held(**held(v)))) for v in (1.0, 4.0))
    (found,) = then.differences(now)
    assert str(found) == "the values in the Held modules of the model" and found.is_of_values


@pytest.mark.parametrize("made", [time.time, lambda: str(uuid.uuid4()), lambda: uuid.uuid4().hex])
def test_times_and_ids_that_each_process_draws_are_no_values(made: Callable[[], Any]) -> None:
    then, now = (described(lambda: recipe(Held(made=made(), at=f"it is {made()}"))) for _ in "12")
    assert then.differences(now) == []


def closes_over(scale: float) -> nn.Module:
    class Scales(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale

    return nn.Sequential(nn.Linear(8, 16), Scales(16, 3))


class Remembers(nn.Module):
    """Keeps tables where all of its instances and calls find them."""

    tables: ClassVar[dict[int, float]] = {}

    def forward(self, x: torch.Tensor, known: list[int] = []) -> torch.Tensor:  # noqa: B006
        known.append(len(x))
        return x * self.tables.setdefault(len(x), 1.0)


def test_what_calls_have_left_in_a_class_or_a_default_is_no_other_code() -> None:
    then = described(lambda: recipe(nn.Sequential(nn.Linear(8, 3), Remembers())))
    Remembers()(torch.ones(7, 3))
    assert then.differences(described(lambda: recipe(net(Remembers())))) != []
    assert (
        then.parts["the code of class Remembers"]
        == (described(lambda: recipe(net(Remembers()))).parts["the code of class Remembers"])
    )


SCALES: dict[str, float] = {}


def of_registry(scale: float) -> nn.Module:
    SCALES["last"] = scale

    def made(scales: dict[str, float]) -> type[nn.Module]:
        class Scales(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * scales["last"]

        return Scales

    return nn.Sequential(nn.Linear(8, 16), made(SCALES)(16, 3))


def test_what_trials_share_and_a_class_closes_over_is_no_other_code() -> None:
    then, now = (described(lambda v=v: recipe(of_registry(v))) for v in (1.0, 4.0))
    assert then.differences(now) == []


def hooked(scale: float) -> nn.Module:
    model = net()
    model[0].register_forward_hook(lambda module, inputs, output: output * scale)
    return model


def in_order(scale: float) -> nn.Module:
    layers = {"tanh": nn.Tanh(), "relu": nn.ReLU()}
    names = sorted(layers, reverse=scale > 1)
    inner = nn.Sequential(OrderedDict((name, layers[name]) for name in names))
    return nn.Sequential(nn.Linear(8, 16), inner, nn.Linear(16, 3))


def steps_with_a_hook(scale: float) -> Recipe:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if scale > 1:
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    return recipe(model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda v: recipe(closes_over(v)), "the code of class closes_over.<locals>.Scales"),
        (lambda v: recipe(hooked(v)), "the Linear modules of the model"),
        (lambda v: recipe(in_order(v)), "the order of the model's layers"),
        (steps_with_a_hook, "the hooks of the optimizer's steps"),
    ],
)
def test_what_code_is_made_with_counts(make: Callable[[float], Recipe], part: str) -> None:
    then, same, now = (described(lambda v=v: make(v)) for v in (1.0, 1.0, 4.0))
    assert then.differences(same) == []
    (found,) = then.differences(now)
    assert found.part == part and not found.is_of_values


LOSS = """
def helper(x):
    return x * {factor}

class Loss(torch.nn.CrossEntropyLoss):
    def forward(self, outputs, labels):
        "{doc}"
        return helper(super().forward(outputs, labels))
"""


def written(before: str = "", doc: str = "", factor: int = 2) -> TrialCode:
    """Return the code of a trial whose loss stands in a file that was written so."""
    names: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec(compile(before + LOSS.format(doc=doc, factor=factor), f"/at/{before!r}", "exec"), names)
    return described(lambda: recipe(loss=names["Loss"]()))


def test_code_counts_and_not_where_or_how_it_is_written() -> None:
    then = written()
    assert then.differences(written(before="\n\n# a comment\n", doc="Say more.")) == []
    (helped,) = then.differences(written(factor=3))
    assert str(helped) == "the code of function helper"


def test_other_versions_of_a_library_are_not_compared() -> None:
    then, now = described(recipe), described(lambda: recipe(batch_size=8))
    assert then.is_comparable(now) and then.differences(now)
    assert not then.is_comparable(replace(now, versions={**now.versions, "torch": "0.1"}))
    assert then.is_comparable(replace(now, versions={**now.versions, "timm": "0.1"}))


class Strange(nn.CrossEntropyLoss):
    """A loss whose attributes can't be looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("look away")


def test_what_can_not_be_looked_at_has_no_code() -> None:
    made = recipe()
    made.loss = Strange.__new__(Strange)
    assert trial_code(made) is None
