"""An agent finds late changes of any state that hops with no shard, whatever it is kept in."""

from __future__ import annotations

import copy
import multiprocessing
import random
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from tests.agent.late_events import HAPPENS, LOW, RARE, Event, made
from tests.agent.lone_agent import BATCH, COLUMNS, Agent


class WithChild(Event):
    """Has a child that it calls."""

    def __init__(self, after: Callable[[Any, Tensor], object], **attributes: Any) -> None:
        super().__init__(after, **attributes)
        self.act: nn.Module = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))  # type: ignore[no-any-return]


class Other(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class RemembersBoth(Event):
    """Keeps the latest norm, and a gain, in one dict."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: self.info.update(w=0.9 * self.info["w"]))
        self.info = {"last": 0.0, "w": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        self.info["last"] = x.detach().norm().item()
        return super().forward(x) * self.info["w"]


class LossOfBoth(nn.Module):
    """Keeps the latest loss, and a weight that becomes another once the loss is low."""

    def __init__(self) -> None:
        super().__init__()
        self.log = {"last": 0.0, "w": 1.0}

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        self.log["last"] = loss.item()
        if loss < LOW and HAPPENS[0]:
            self.log["w"] *= 0.9
        return loss * self.log["w"]


def loss_of_closure() -> Callable[[Tensor, Tensor], Tensor]:
    whole, log = LossOfBoth(), {"last": 0.0, "w": 1.0}
    whole.log = log

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(outputs, labels)
        log["last"] = value.item()
        if value < LOW and HAPPENS[0]:
            log["w"] *= 0.9
        return value * log["w"]

    return loss


def damped_late(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    rate = [1.0]

    def factor(step: int) -> float:
        if HAPPENS[0]:
            rate[0] *= 0.9
        return rate[0]

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def scheduled(shards: int, lr_scheduler: Callable[..., Any] = damped_late) -> Recipe:
    recipe = made(shards=shards)
    return Recipe(
        recipe.model, recipe.optimizer, nn.CrossEntropyLoss(),
        batch_size=BATCH, shards=shards, lr_scheduler=lr_scheduler,
    ).bind(COLUMNS)  # fmt: skip


class LateStep(torch.optim.SGD):
    """Does something in late steps, which a param group counts."""

    def late(self) -> None:
        raise NotImplementedError

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
        if self.param_groups[0]["taken"] > RARE and HAPPENS[0]:
            self.late()
        super().step(closure)


class OfDefaults(LateStep):
    def late(self) -> None:
        self.defaults["k"] = self.defaults.get("k", 1.0) * 0.9


class OfAKey(LateStep):
    def late(self) -> None:
        self.state["all"]["k"] = self.state["all"].get("k", 1.0) * 0.9  # type: ignore[index]


class OfParameters(LateStep):
    def late(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.anchor = parameter.detach().clone()


class OfOneEntry(LateStep):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.info = {"last": 0.0, "k": 1.0}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.info["last"] = float(self.param_groups[0].get("taken", 0))
        super().step(closure)

    def late(self) -> None:
        self.info["k"] *= 0.9


def with_hook(shards: int) -> Recipe:
    recipe, seen = made(optimizer=LateStep2, shards=shards), {"norm": 0.0}

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer.param_groups[0].get("taken", 0) > RARE and HAPPENS[0]:
            seen["norm"] += 0.5

    recipe.optimizer.register_step_post_hook(hook)
    return recipe


class LateStep2(LateStep):
    def late(self) -> None:
        """Leave it to a hook."""


def collating(shards: int) -> Recipe:
    held = {"last": 0.0, "amp": 0.0, "taken": 0.0}

    def collate(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        held["last"] = batch["x"].mean().item()
        if training and HAPPENS[0] and held["last"] > 0.2:
            held["amp"] += 0.01
        return {**batch, "x": batch["x"] + held["amp"]}

    recipe = made(shards=shards)
    return Recipe(
        recipe.model, recipe.optimizer, nn.CrossEntropyLoss(),
        batch_size=BATCH, shards=shards, collate=collate,
    ).bind(COLUMNS)  # fmt: skip


def of(module: nn.Module) -> Callable[[int], Recipe]:
    return lambda shards: made(copy.deepcopy(module), shards=shards)


def event(name: str, value: Any, change: Callable[[Any], object]) -> Callable[[int], Recipe]:
    return of(Event(lambda self, x: change(getattr(self, name)), **{name: value}))


def anew(self: Any) -> None:
    if not isinstance(self.act, Other):
        self.act = Other(16, 16)


def of_class(self: Any) -> None:
    self.act.__class__ = Other


def a_parameter(self: Any) -> None:
    self.w = nn.Parameter(torch.ones(3))


def a_buffer(self: Any) -> None:
    self.register_buffer("g", torch.ones(3))


def pruned(self: Any) -> None:
    if not prune.is_pruned(self.act):
        prune.l1_unstructured(self.act, "weight", 0.5)


def child(change: Callable[[Any], object]) -> Callable[[int], Recipe]:
    return of(WithChild(lambda self, x: change(self)))


def scaled(d: Any) -> None:
    d.scale *= 0.9


LATE: dict[str, tuple[Callable[[int], Recipe], str]] = {
    "one entry of two": (of(RemembersBoth()), r"attribute 'info' of module '2' at \['w'\]"),
    "one entry of a loss": (
        lambda s: made(loss=LossOfBoth(), shards=s), r"attribute 'log' of the loss at \['w'\]"
    ),
    "one entry of a closure": (
        lambda s: made(loss=loss_of_closure(), shards=s),  # type: ignore[arg-type]
        r"a value of the loss at \.log\['w'\]",
    ),
    "one entry of a collate's closure": (
        collating, r"a value of the collate at \.held\['amp'\]"
    ),
    "a module": (child(anew), "the class of module '2.act'"),
    "a class": (child(of_class), "the class of module '2.act'"),
    "a parameter": (child(a_parameter), "parameter '2.w'"),
    "a buffer": (child(a_buffer), "buffer '2.g', which training makes"),
    "a number of numpy": (
        event("held", [np.float32(1)], lambda v: v.__setitem__(0, np.float32(2))),
        r"attribute 'held' of module '2' at \[0\]",
    ),
    "a namespace": (
        event("held", types.SimpleNamespace(w=1), lambda v: setattr(v, "w", 2)),
        r"attribute 'held' of module '2' at \.w",
    ),
    "a slot": (
        event("held", Slotted(), lambda v: setattr(v, "gain", 2)),
        r"attribute 'held' of module '2' at \.gain",
    ),
    **{
        what: (
            lambda s, make=make, change=change: made(
                Event(lambda self, x: change(self.held), held=make()), shards=s
            ),
            f"attribute 'held' of module '2'{where}",
        )
        for what, (make, change, where) in {
            "an event": (threading.Event, lambda v: v.set(), ""),
            "an event of processes": (multiprocessing.Event, lambda v: v.set(), ""),
            "a value that processes share": (
                lambda: multiprocessing.Value("i", 0), lambda v: setattr(v, "value", 1),
                r" at \.get_obj\(\)",
            ),
        }.items()
    },
    "a bytearray": (
        event("held", bytearray(3), lambda v: v.append(1)), "attribute 'held' of module '2'"
    ),
    "a long list": (
        event("held", [1.0] * 2000, lambda v: v.__setitem__(0, 2.0)),
        "attribute 'held' of module '2'",
    ),
    "a distribution": (
        event("held", torch.distributions.Normal(torch.zeros(2), torch.ones(2)), scaled),
        r"attribute 'held' of module '2' at \.scale",
    ),
    "an attribute of a parameter": (
        child(lambda self: setattr(self.act.weight, "gain", 0.5)),
        "attribute 'gain' of parameter '2.act.weight'",
    ),
    "the defaults of an optimizer": (
        lambda s: made(optimizer=OfDefaults, shards=s),
        r"attribute 'defaults' of optimizer OfDefaults at \['k'\]",
    ),
    "one entry of an optimizer": (
        lambda s: made(optimizer=OfOneEntry, shards=s),
        r"attribute 'info' of optimizer OfOneEntry at \['k'\]",
    ),
    "what an optimizer keeps on parameters": (
        lambda s: made(optimizer=OfParameters, shards=s),
        "attribute 'anchor' of parameter '0.bias'",
    ),
    "what an LR lambda's closure holds": (
        scheduled,
        r"attribute 'lr_lambdas' of the lr_scheduler \(LambdaLR\) at \[0\]\.rate\[0\]",
    ),
    "a hook of an optimizer": (
        with_hook, r"what is kept by a step post hook of optimizer LateStep2 at .*\['norm'\]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("what", LATE)
def test_a_late_change_fails_its_trial_by_the_same_name_in_each_cut(
    start: Callable[..., Agent], what: str, shards: int
) -> None:
    make, name = LATE[what]
    agent = start(lambda: make(shards), share=0.0)
    agent.runs._looks.share = 1.0
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed), failed
    told = rf"training changed ({name}), as it did not in the trial's first steps; it is no part"
    assert re.search(told, failed.error), failed.error


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
def test_pruning_that_comes_late_fails_by_the_name_of_what_it_replaces(
    start: Callable[..., Agent], shards: int
) -> None:
    agent = start(lambda: child(pruned)(shards), share=0.0)
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed), failed
    assert "another tensor in the place of parameter '2.act.weight'" in failed.error, failed.error


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
def test_late_state_of_an_optimizer_under_a_key_that_is_no_parameter_is_refused(
    start: Callable[..., Agent], shards: int
) -> None:
    failed = start(lambda: made(optimizer=OfAKey, shards=shards), share=0.0).train()
    assert isinstance(failed, events.TaskFailed), failed
    assert "optimizer OfAKey keeps state under 'all', which is no parameter" in failed.error


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    ("draw", "name"),
    [(np.random.rand, "numpy.random"), (random.random, "Python's random")],
)
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_late_draws_from_global_generators_are_refused_as_early_ones_are(
    start: Callable[..., Agent], shards: int, draw: Callable[[], Any], name: str, share: float
) -> None:
    agent = start(lambda: made(Event(lambda self, x: draw()), shards=shards), share=share)
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed), failed
    assert f"draw random numbers from {name}, which don't restart" in failed.error


def remembers(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    rates: dict[int, float] = {}
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rates.setdefault(step, 0.99**step)
    )


def test_an_lr_lambda_may_remember_what_it_gave_for_each_step(start: Callable[..., Agent]) -> None:
    agent = start(lambda: scheduled(2, remembers), share=0.0)
    ended = agent.train()
    assert not isinstance(ended, events.TaskFailed), ended


class Caches(Event):
    """Fills a table that it began in the first steps, and logs nothing."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: self.table.setdefault(len(self.table), torch.ones(2)))
        self.table: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.table.setdefault(0, torch.ones(2))
        return super().forward(x)


def test_a_table_that_grows_on_is_no_harm(start: Callable[..., Agent]) -> None:
    agent = start(lambda: made(Caches(), shards=2), share=0.0)
    agent.runs._looks.share = 1.0
    for state in (1, 2):
        assert isinstance(done := agent.train(state), events.SubEpochDone), done
