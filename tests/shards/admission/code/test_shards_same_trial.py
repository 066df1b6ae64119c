"""A trial is the same on a worker as in the driver, or fails by the name of what differs."""

from __future__ import annotations

import ast
import os
from dataclasses import replace
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _pytest.assertion.rewrite import rewrite_asserts
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.same_trial import check_same_trial
from cerebro_hydra.shards.admission.trial_code import trial_code
from cerebro_hydra.shards.cut.sample import Example

MASK: Any = torch.ones(3)
WEIGHTS: Any = np.ones(3)
ORDER: Any = [0, 1, 2]
SHARES: Any = (0.5, 0.25)
NEIGHBOURS: Any = torch.eye(3).to_sparse()
RATES, LOSS_GAIN, GAMMA = [1.0], 1.0, 0.5
TABLE, GAIN, KIND, RATE, DEPTH, LR = 1.0, 1.0, "sum", 0.1, 1, 0.1
SCRATCH, PIECES = torch.zeros(3), np.zeros(3)
NUMBER, BEGUN, DEVICE, PLACES = 1, 0.5, "here", (3, 2)
MANY = {f"value_{number:02}": 1.0 for number in range(40)}


def example() -> Example:
    return (torch.randn(6, 4),), (torch.arange(6) % 3,)


class Level(Enum):
    LOW = 1.0
    HIGH = 2.0


CONFIG: Any = SimpleNamespace(
    uses_gain=False, gain=1.0, powers=[1.0], notes={"seed": 1}, act=F.relu, level=Level.LOW,
    dtype=torch.float32, number=np.float32(1), prompt="a " * 99, weights=None, log=None,
    of=lambda x: x,
)  # fmt: skip


class Settings:
    scale = 1.0
    is_deep = False
    shift = 0.0

    @classmethod
    def shifted(cls, shift: float) -> None:
        cls.shift = shift


def configured(x: Tensor) -> Tensor:
    """Compute what the variables of this module say."""
    x = x * CONFIG.gain if CONFIG.uses_gain else x
    x = x * getattr(CONFIG, "scale", 1.0) * getattr(Settings, "bias", 1.0)
    x = (x + Settings.shift).to(CONFIG.dtype).float() * CONFIG.level.value * CONFIG.number
    x = CONFIG.of(x) * (len(CONFIG.prompt) / 198)
    if CONFIG.weights is not None:
        x = x * CONFIG.weights.mean()
    if CONFIG.log is not None:
        CONFIG.log("configured")
    x = x * CONFIG.notes.get("weight", 1.0) * sum(CONFIG.powers) * MANY["value_39"]
    return CONFIG.act(x)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """Has more values than are told one by one, and a table beside its state."""

    def __init__(self) -> None:
        super().__init__()
        vars(self).update({f"value_{number}": number for number in range(600)})
        self.register_buffer("table", torch.ones(4) * TABLE, persistent=False)
        self.held = SimpleNamespace(rates=(1.0, RATES))
        self.begun, self.places = BEGUN, [*PLACES]

    def forward(self, x: Tensor) -> Tensor:
        SCRATCH.copy_(x[0, :3].detach())
        PIECES[...] = SCRATCH.numpy()
        if NUMBER < 0 or DEVICE == "nowhere" or PLACES[0] < 0 or self.places[0] < 0:
            raise RuntimeError
        x = (
            x * self.table * Settings.scale * self.held.rates[1][0]
            + SCRATCH.mean()
            + float(PIECES.mean())
        )
        return x.tanh() if Settings.is_deep else configured(x)


def made() -> Recipe:
    layers = [nn.Linear(4, 4) for _ in range(DEPTH)]
    model = nn.Sequential(Scaled(), *layers, nn.Dropout(RATE), nn.Linear(4, 3))

    def loss(outputs: Tensor, labels: Tensor, gain: dict[str, float]) -> Tensor:
        outputs = outputs[:, ORDER] * MASK @ NEIGHBOURS * GAIN
        outputs = outputs * gain["by"]
        total = outputs.mean() if KIND == "mean" else outputs.square().sum()
        return total * WEIGHTS[0] * SHARES[1]  # type: ignore[no-any-return]

    by_gain, gamma = partial(loss, gain={"by": LOSS_GAIN}), GAMMA
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    schedule = partial(LambdaLR, lr_lambda=lambda epoch: gamma**epoch)
    return Recipe(model, optimizer, by_gain, lr_scheduler=schedule)


def check(monkeypatch: pytest.MonkeyPatch, **others: Any) -> bool:
    """Check a trial in a process that has other values of variables, or of settings."""
    then = trial_code(made())
    set_in(monkeypatch, others)
    torch.manual_seed(0)
    return check_same_trial(then, made(), example, 5, made)


def set_in(monkeypatch: pytest.MonkeyPatch, others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name in globals():
            monkeypatch.setitem(globals(), name, value)
        else:
            monkeypatch.setattr(Settings, name, value, raising=False)


@pytest.mark.parametrize(
    ("name", "other", "told"),
    [
        ("MASK", torch.zeros(3), "global variable 'MASK' has other numbers"),
        ("WEIGHTS", np.zeros(3), "global variable 'WEIGHTS' has other numbers"),
        ("ORDER", [0, 2, 0], r"global variable 'ORDER' at \[1\] has other numbers"),
        ("SHARES", (0.5, 0.75), r"global variable 'SHARES' at \[1\] has other numbers"),
        ("NEIGHBOURS", (torch.eye(3) * 2).to_sparse(), "'NEIGHBOURS' has other numbers"),
        ("NEIGHBOURS", torch.eye(3)[[1, 0, 2]].to_sparse(), "'NEIGHBOURS' has other numbers"),
        ("TABLE", 2.0, "buffer '0.table' has other numbers"),
        ("RATES", [2.0], r"attribute 'held' of module '0' at .rates\[1\]\[0\] has other numbers"),
        (
            "LOSS_GAIN",
            2.0,
            r"a value of the loss at \.keywords\S+ is 2.0 and not 1.0",
        ),
        ("GAMMA", 0.6, r"a value of the lr_scheduler at \S+ is 0.6 and not 0.5"),
        ("GAIN", 2.0, "global variable 'GAIN' is 2.0 and not 1.0"),
        ("KIND", "mean", "global variable 'KIND' is 'mean' and not 'sum'"),
        ("scale", 3.0, "attribute 'scale' of class Settings is 3.0 and not 1.0"),
        ("is_deep", True, "attribute 'is_deep' of class Settings is True and not False"),
        ("RATE", 0.2, "than in the driver: the options of the Dropout modules"),
        ("LR", 0.2, "than in the driver: the optimizer's lr, 0.2 and not 0.1"),
        ("DEPTH", 2, "another trial on this worker than in the driver: "),
    ],
)
def test_what_is_another_one_than_in_the_driver_fails_by_name(
    name: str, other: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        check(monkeypatch, **{name: other})


def twice(x: Tensor) -> Tensor:
    return x * 2


def told_to_nobody(text: str) -> None:
    """Log nothing."""


def config(**changed: Any) -> dict[str, Any]:
    return {"CONFIG": SimpleNamespace(**{**vars(CONFIG), **changed})}


OTHERS = [
    (config(uses_gain=True, gain=2.0), "'CONFIG' at .gain is"),
    ({"MANY": {name: 2.0 for name in MANY}}, r"'MANY' at \['value_39'\] is"),
    (config(act=F.gelu), r"'CONFIG' at .act is \w+ \S*(gelu|relu) and not"),
    (config(scale=2.0), "'CONFIG' at .scale is 2.0 .* there"),
    (config(powers=[1.0, 3.0]), r"'CONFIG' at .powers\[1\] is 3.0 .* there"),
    (config(notes={"weight": 2.0}), r"'CONFIG' at .notes\['weight'\] is 2.0 .* there"),
    (config(level=Level.HIGH), "'CONFIG' at .level is enum Level (HIGH|LOW) and not"),
    (config(dtype=torch.bfloat16), "'CONFIG' at .dtype is torch.dtype"),
    (config(number=np.float32(2)), "'CONFIG' at .number has other numbers"),
    (config(gain=np.float64(2), uses_gain=True), "'CONFIG' at .(gain has other|uses_gain is)"),
    (config(prompt="b " * 100), "'CONFIG' at .prompt has other"),
    (config(of=twice), "'CONFIG' at .of is function"),
    ({"shift": 1.0}, "attribute 'shift' of class Settings is"),
    ({"bias": 2.0}, "attribute 'bias' of class Settings is 2.0 .* there"),
]


@pytest.mark.parametrize(("others", "told"), OTHERS)
def test_what_a_worker_alone_has_and_one_of_many_fails_by_name(
    others: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        check(monkeypatch, **others)


@pytest.mark.parametrize(("others", "told"), OTHERS)
def test_what_the_driver_alone_has_and_some_values_together_fail_by_name(
    others: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch and its number change nothing alone where the switch is off."""
    with monkeypatch.context() as driver:
        set_in(driver, others)
        then = trial_code(made())
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match=told) as failed:
        check_same_trial(then, made(), example, 5, made)
    together = getattr(others.get("CONFIG"), "uses_gain", False)
    assert not together or "'CONFIG' at .uses_gain is" in str(failed.value)
    assert not check_same_trial(trial_code(made()), made(), example, 5, made), "all is as it was"


@pytest.mark.parametrize(
    "others",
    [
        {"MANY": {name: 2.0 for name in MANY if name != "value_39"} | {"value_39": 1.0}},
        config(noted=3, notes={"seed": 2, "begun": "now"}, gain=5.0),
        config(log=print),
        config(log=told_to_nobody),
    ],
    ids=["many", "one-sided", "print", "log"],
)
def test_many_values_and_those_of_one_side_may_differ_where_no_step_depends_on_them(
    others: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(monkeypatch, **others)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("NUMBER", 4321),
        ("BEGUN", 61954.75),
        ("DEVICE", "there"),
        ("SCRATCH", torch.ones(3)),
        ("PIECES", np.ones(3)),
        ("PLACES", (7, 2)),
    ],
)
def test_what_changes_no_step_may_differ_and_another_model_is_built(
    name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(monkeypatch, **{name: other})


@pytest.mark.parametrize(("name", "other"), [("MASK", torch.ones(1)), ("WEIGHTS", np.ones(2))])
def test_a_table_of_another_form_may_be_one_for_other_rows(
    name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not check(monkeypatch, **{name: other})


@pytest.mark.parametrize(
    ("owner", "told"),
    [
        (Scaled, "the code of Scaled.forward"),
        (nn.Linear, "methods of installed classes that are replaced, none and not Linear.forward"),
    ],
)
def test_a_method_that_the_driver_has_put_into_a_class_is_other_code(
    owner: type[nn.Module], told: str
) -> None:
    def patched(self: Any, x: Tensor) -> Tensor:
        return x[:, :3] if x.shape[1] > 3 and getattr(self, "out_features", 4) == 3 else x

    with pytest.MonkeyPatch.context() as driver:
        driver.setattr(owner, "forward", patched)
        then = trial_code(made())
    with pytest.raises(ConfigurationError, match=told):
        check_same_trial(then, made(), example, 5, made)


def test_a_tensor_in_place_of_none_fails_by_name_and_a_new_method_does_not() -> None:
    with pytest.MonkeyPatch.context() as driver:
        set_in(driver, config(weights=torch.ones(3)))
        driver.setattr(Scaled, "predict", lambda self: None, raising=False)
        driver.setattr(Scaled, "__repr__", lambda self: "Scaled", raising=False)
        then = trial_code(made())
        assert not check_same_trial(then, made(), example, 5, made)
    with pytest.raises(ConfigurationError, match=r"'CONFIG' at \.weights has other numbers"):
        check_same_trial(then, made(), example, 5, made)


def test_a_function_that_a_document_names_is_not_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever may write to the store could let workers call it."""
    called: list[str] = []
    monkeypatch.setattr(os, "system", called.append)
    set_in(monkeypatch, config(log=told_to_nobody))
    then = trial_code(made())
    assert then is not None
    (name,) = (name for name in then.values if "'CONFIG' at .log" in name)
    forged = replace(then, values={**then.values, name: "function os.system"})
    assert check_same_trial(forged, made(), example, 5, made)
    assert called == []


def test_an_equal_trial_is_not_built_again_and_one_of_an_older_version_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not check(monkeypatch)
    assert not check_same_trial(None, made(), example, 5, made)


class Stepping(torch.optim.SGD):
    """Has the `step` of torch, around which torch puts its own where this one is made first."""


def test_what_torch_sets_in_classes_of_optimizers_is_no_other_code() -> None:
    def stepping() -> Recipe:
        made_before = made()
        optimizer = Stepping(made_before.model.parameters(), lr=0.1)
        return Recipe(made_before.model, optimizer, made_before.loss)

    then = trial_code(stepping())
    before = vars(Stepping).get("step")
    if before is None:
        Stepping.step = torch.optim.SGD.step  # type: ignore[method-assign]
    else:
        del Stepping.step
    try:
        assert not check_same_trial(then, stepping(), example, 5)
    finally:
        if before is None:
            del Stepping.step


ASSERTING = """
def loss(outputs, labels):
    assert outputs.shape == labels.shape
    return (outputs - labels).mean()
"""


def test_assertions_that_pytest_has_rewritten_are_no_other_code() -> None:
    def asserting(rewritten: bool) -> Recipe:
        tree = ast.parse(ASSERTING)
        if rewritten:
            rewrite_asserts(tree, ASSERTING.encode())
        space = {"__name__": __name__}
        exec(compile(tree, "losses", "exec"), space)
        made_before = made()
        return Recipe(made_before.model, made_before.optimizer, space["loss"])

    then = trial_code(asserting(rewritten=True))
    assert then is not None and "loss" not in then.code
    assert not check_same_trial(then, asserting(rewritten=False), example, 5)


class Clipping(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class ClippingMore(Clipping):
    pass


def test_which_optimizer_a_process_makes_first_is_no_other_code() -> None:
    written = Clipping.step

    def clipping(first: type[Clipping]) -> Recipe:
        Clipping.step = written  # type: ignore[method-assign]
        if "step" in vars(ClippingMore):
            del ClippingMore.step
        trial = made()
        first(trial.model.parameters(), lr=0.1)
        return Recipe(trial.model, ClippingMore(trial.model.parameters(), lr=0.1), trial.loss)

    then = trial_code(clipping(Clipping))
    assert then is not None and "step" not in vars(ClippingMore)
    now = clipping(ClippingMore)
    assert "step" in vars(ClippingMore)
    assert not check_same_trial(then, now, example, 5)
    Clipping.step = written  # type: ignore[method-assign]
    code = then.code["Clipping.step"]
    Clipping.step = lambda self, closure=None: None  # type: ignore[method-assign]
    Clipping.step.__qualname__ = "Clipping.step"
    other = trial_code(Recipe(now.model, ClippingMore(now.model.parameters(), lr=0.1), now.loss))
    Clipping.step = written  # type: ignore[method-assign]
    assert other is not None and other.code["Clipping.step"] != code, "whatever torch wraps"
