"""An agent finds what training changes only late, and what no shard takes along at a hop."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from tests.agent.late_events import HAPPENS, LOW, RARE, STEPS, Event, made
from tests.agent.lone_agent import Agent


class LateLoss(nn.Module):
    """Moves a buffer once the loss is low."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.register_buffer("low", torch.zeros(()))
        self.lowest = 9.0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        if loss < LOW and HAPPENS[0] and self.kept == "buffer":
            self.low += 0.1
        if loss < LOW and HAPPENS[0] and self.kept == "attribute":
            self.lowest = loss.item()
        return loss * (1 + self.low)


class LateOptimizer(torch.optim.AdamW):
    """Changes an attribute once it has taken some steps, which a param group counts."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["taken"] = group.get("taken", 0) + 1
            if group["taken"] > RARE and HAPPENS[0]:
                self.late = True


class ClipsLate(torch.optim.AdamW):
    """Clips by the norm of all gradients that it sees, once they are known to be steady."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["taken"] = group.get("taken", 0) + 1
        if group["taken"] > RARE and HAPPENS[0]:
            nn.utils.clip_grad_norm_(group["params"], 1e-3)
        super().step(closure)


def dampens(self: Any, x: Tensor) -> None:
    self.gain *= 0.9


def counts(self: Any, x: Tensor) -> None:
    self.ticks += 1
    self.gain = 0.5 if self.ticks == 700 else 1.0


class Averages(Event):
    """Keeps the mean of its latest inputs, and later an average of such means."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        share = 0.5 if self.steps > RARE and HAPPENS[0] else 0.0
        self.mean = share * self.mean + (1 - share) * x.mean().item()
        return super().forward(x)


class MakesFirst(Event):
    """Makes a gain in its first forward, which damps later."""

    def __init__(self, value: Any, buffer: bool = False) -> None:
        super().__init__(self.damp)
        self.value, self.buffer = value, buffer

    def damp(self, *_: Any) -> None:
        self.made -= 1

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            if self.buffer:
                self.register_buffer("made", self.value.clone(), persistent=False)
            else:
                self.made = self.value.clone() if isinstance(self.value, Tensor) else self.value
        return super().forward(x) * self.made


class Modes(Event):
    """Names its mode in the first forward, and another one later."""

    def __init__(self, mode: Any, later: Any) -> None:
        super().__init__(lambda self, _: setattr(self, "mode", later))
        self.first = mode

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mode"):
            self.mode = self.first
        return super().forward(x) * (1.0 if self.mode == self.first else 0.5)


class Sticks(Event):
    """Sets a scale in each forward, unless it has another one, as late ones have."""

    def __init__(self) -> None:
        super().__init__(lambda self, _: setattr(self, "scale", 0.5))
        self.scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.scale != 0.5:
            self.scale = 1.0
        return super().forward(x) * self.scale


class Prepares(Event):
    """Makes a gain and a flag that it is there, and later another gain."""

    def __init__(self) -> None:
        super().__init__(lambda self, _: setattr(self, "gained", 0.5))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready, self.gained = True, 1.0
        return super().forward(x) * self.gained


class Phase(Enum):
    """Tells how far a training is."""

    EARLY = 1
    LATE = 2


class LooksAt(Event):
    """Sets a value in each forward, having looked at what the one before has set.

    Args:
        first: the value at first.
        later: the value later.
        looks: says of a value whether it damps.
    """

    def __init__(self, first: Any, later: Any, looks: Callable[[Any], bool]) -> None:
        super().__init__(lambda *_: None)
        self.first, self.later, self.looks, self.seen = first, later, looks, None

    def forward(self, x: Tensor) -> Tensor:
        gain = 0.5 if self.looks(self.seen) else 1.0
        late = self.training and self.steps >= RARE and HAPPENS[0]
        self.seen = self.later if late else self.first
        return super().forward(x) * gain


class FillsFirst(Event):
    """Fills a container in its first forward, with which it computes, and later with more.

    Args:
        parts: the container, which is empty.
        adds: makes another entry.
    """

    def __init__(self, parts: Any, adds: Callable[[Any], object]) -> None:
        super().__init__(lambda self, _: self.adds(self.parts))
        self.parts, self.adds = parts, adds

    def forward(self, x: Tensor) -> Tensor:
        if not self.parts and isinstance(self.parts, dict):
            self.parts["first"] = 1.0
        elif not self.parts:
            self.parts.append(1.0)
        entries = self.parts.values() if isinstance(self.parts, dict) else self.parts
        return super().forward(x) * math.prod(entries)


class MakesMany(Event):
    """Makes twenty gains in its first forward, the last of which damps later."""

    def __init__(self) -> None:
        super().__init__(lambda self, _: setattr(self, "gain19", 0.9))

    def forward(self, x: Tensor) -> Tensor:
        names = [f"gain{number:02}" for number in range(20)]
        if not hasattr(self, names[0]):
            vars(self).update({name: 1.0 for name in names})
        return super().forward(x) * math.prod(vars(self)[name] for name in names)


LATE: dict[str, tuple[Callable[..., Recipe], str]] = {
    "an attribute that acts": (
        lambda **o: made(Event(dampens, gain=1.0), **o), "attribute 'gain' of module '2'"
    ),
    "a counter that would act": (
        lambda **o: made(Event(counts, gain=1.0, ticks=0), **o), "attribute 'ticks' of module '2'"
    ),
    "a number that the first forward makes": (
        lambda **o: made(MakesFirst(1.0), **o), "attribute 'made' of module '2'"
    ),
    "a tensor that the first forward makes": (
        lambda **o: made(MakesFirst(torch.ones(16)), **o), "attribute 'made' of module '2'"
    ),
    "a whole number that the first forward makes": (
        lambda **o: made(Modes(0, 1), **o), "attribute 'mode' of module '2'"
    ),
    "a number that becomes a tensor": (
        lambda **o: made(Modes(1, torch.tensor(0.5)), **o), "attribute 'mode' of module '2'"
    ),
    "a function that the first forward chooses": (
        lambda **o: made(Modes(torch.tanh, torch.sin), **o), "attribute 'mode' of module '2'"
    ),
    "a type that the first forward chooses": (
        lambda **o: made(Modes(torch.float32, torch.float64), **o), "attribute 'mode' of module '2'"
    ),
    "a text that the first forward makes": (
        lambda **o: made(Modes("warm", "as it is"), **o), "attribute 'mode' of module '2'"
    ),
    "a number that the first forward makes and a later one lacks": (
        lambda **o: made(Modes(1, None), **o), "attribute 'mode' of module '2'"
    ),
    "the last of many numbers that the first forward makes": (
        lambda **o: made(MakesMany(), **o), "attribute 'gain19' of module '2'"
    ),
    "a number that the first forward makes with a flag": (
        lambda **o: made(Prepares(), **o), "attribute 'gained' of module '2'"
    ),
    **{
        f"a value of which each forward asks {question}": (
            lambda given=given, **o: made(LooksAt(*given), **o), "attribute 'seen' of module '2'"
        )
        for question, given in {
            "whether it is a member": (Phase.EARLY, Phase.LATE, lambda seen: seen is Phase.LATE),
            "whether it is true": (False, True, lambda seen: seen is True),
            "for its type": (1.0, torch.tensor(0.5), torch.is_tensor),
        }.items()
    },
    "a new entry of a dict that the first forward fills": (
        lambda **o: made(FillsFirst({}, lambda parts: parts.update({"late": 0.5})), **o),
        "attribute 'parts' of module '2' at ['late']",
    ),
    "a new entry of a list that the first forward fills": (
        lambda **o: made(FillsFirst([], lambda parts: parts.append(0.5)), **o),
        "attribute 'parts' of module '2' at [1]",
    ),
    "a number that each forward looks at before it sets it": (
        lambda **o: made(Sticks(), **o), "attribute 'scale' of module '2'"
    ),
    "whole numbers that the first forward makes": (
        lambda **o: made(MakesFirst(torch.full((16,), 2)), **o), "attribute 'made' of module '2'"
    ),
    "a buffer that the first forward makes": (
        lambda **o: made(MakesFirst(torch.ones(16), buffer=True), **o),
        "buffer '2.made', which training makes",
    ),
    "a buffer of a loss": (
        lambda **o: made(loss=LateLoss("buffer"), **o), "buffer 'low' of the loss"
    ),
    "an attribute of a loss": (
        lambda **o: made(loss=LateLoss("attribute"), **o), "attribute 'lowest' of the loss"
    ),
    "an attribute of an optimizer": (
        lambda **o: made(optimizer=LateOptimizer, **o),
        "attribute 'late' of optimizer LateOptimizer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("share", [0.01, 1e-9])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("what", LATE)
def test_what_changes_late_and_hops_with_no_shard_fails_its_trial_by_name(
    start: Callable[..., Agent], what: str, shards: int, share: float
) -> None:
    make, name = LATE[what]
    agent = start(lambda: make(shards=shards), share=0.0)
    agent.runs._looks.share = share
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed), failed
    assert f"training changed {name}, as it did not in the trial's first steps" in failed.error
    assert not agent.shards.knows(0, 1), "nothing of the sub-epoch is published"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "what", ["an attribute that acts", "an attribute of a loss", "an attribute of an optimizer"]
)
def test_what_takes_no_time_is_compared_though_there_is_none_left_to_look(
    start: Callable[..., Agent], what: str, shards: int
) -> None:
    make, name = LATE[what]
    agent = start(lambda: make(shards=shards), share=0.0)
    agent.runs._looks.share, agent.runs._looks.spent = 0.01, 1e9
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed), failed
    assert f"training changed {name}, as it did not in the trial's first steps" in failed.error


@pytest.mark.parametrize("device", [None, 2])
@pytest.mark.parametrize("shards", [1, 2])
def test_what_depends_on_a_history_is_found_by_an_audit_before_it_acts(
    start: Callable[..., Agent],
    shards: int,
    device: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cerebro_hydra.agent.audits.drawn_window", lambda *_: STEPS - 1)
    agent = start(lambda: made(Averages(), shards=shards), device=device)
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed), failed
    where = rf"at step {STEPS - 1}, in epoch 1 on partition {agent.order[0]} \(worker 0\): "
    assert re.match(
        where + "a step leaves another value in attribute 'mean' of module '2' than", failed.error
    ), failed.error


class Remembers(nn.Module):
    """Keeps what each forward sets anew, and tables that it makes once for each number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}
        self.longest = None

    def forward(self, x: Tensor) -> Tensor:
        self.rows, self.seen = len(x), x.detach()
        self.tables.setdefault(len(x), torch.ones(len(x), 1))
        if self.longest is None or len(self.longest) < len(x):
            self.longest = torch.ones(len(x), 1)
        return x * self.tables[len(x)] * self.longest[: len(x)]


@pytest.mark.parametrize("step", [0, STEPS - 1])
@pytest.mark.parametrize("shards", [1, 2])
def test_what_every_forward_sets_anew_is_no_harm(
    start: Callable[..., Agent], shards: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro_hydra.agent.audits.drawn_window", lambda *_: step)
    agent = start(lambda: made(Remembers(), shards=shards))
    for state in (1, 2):
        done = agent.train(state)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == agent.known(state)
        assert done.audit_seconds > 0


@pytest.mark.parametrize("device", [None, 0.4])
def test_an_optimizer_that_looks_at_all_gradients_later_trains_in_one_piece_or_fails(
    start: Callable[..., Agent], device: float | None
) -> None:
    middle = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    make = lambda: made(copy.deepcopy(middle), optimizer=ClipsLate, shards=4)  # noqa: E731
    agent = start(make, device=device)
    agent.audits.budget.share = 0.0
    failed = agent.train()
    assert isinstance(failed, events.AuditFailed), failed
    assert re.match(
        rf"in step {STEPS - 1}, the optimizer updates parameter '\d.bias' otherwise if another one "
        "has a large gradient",
        failed.difference,
    ), failed.difference
    whole = agent.train(1, uncut=True)
    if device is None:
        assert isinstance(whole, events.SubEpochDone), whole
        assert whole.digests != agent.known(1), "which was trained without clipping"
    else:
        assert isinstance(whole, events.AuditFailed), whole


def test_an_audit_steps_with_an_optimizer_that_sees_all_gradients(
    start: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro_hydra.agent.audits.drawn_window", lambda *_: RARE)
    monkeypatch.setattr(
        "cerebro_hydra.shards.engine.sub_epoch.other_gradients_matter", lambda *given: None
    )
    agent = start(lambda: made(optimizer=ClipsLate, shards=2))
    failed = agent.train()
    assert isinstance(failed, events.AuditFailed), failed
    assert "parameter '0.weight'" in failed.difference


@pytest.mark.parametrize(("shards", "evaluates"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize(
    ("second_name", "told"),
    [
        (lambda model: model[0].bias.data, r"parameter '0\.bias'"),
        (lambda model: model[2].steps, r"buffer '2\.steps'"),
    ],
)
def test_what_reads_a_second_name_only_late_fails_its_trial(
    start: Callable[..., Agent],
    second_name: Callable[[nn.Module], Tensor],
    told: str,
    shards: int,
    evaluates: bool,
) -> None:
    def make() -> Recipe:
        recipe = made(Event(lambda *_: None), shards=shards)
        taken = second_name(recipe.model)

        def add(module: Any, given: object, output: Tensor) -> Tensor:
            reads = HAPPENS[0] and module.steps > RARE and module.training is not evaluates
            return output + taken.sum() if reads else output

        recipe.model[2].register_forward_hook(add)
        return recipe

    agent = start(make)
    trained = agent.train()
    failed = agent.evaluate(1) if evaluates else trained
    assert isinstance(failed, events.TaskFailed), failed
    assert re.search(f"loss .*is nan.* or the loss reads {told} by another name", failed.error)


@pytest.mark.parametrize("shards", [1, 2])
def test_what_changes_while_there_is_no_time_to_look_is_found_at_the_next_look(
    start: Callable[..., Agent], shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    damps_once = lambda self, x: self.gains.update(w=0.5)  # noqa: E731
    agent = start(lambda: made(Event(damps_once, gains={"w": 1.0}), shards=shards), share=0.0)
    monkeypatch.setattr("cerebro_hydra.shards.admission.effects.late_effects.FREE_SECONDS", -1.0)
    looks = agent.runs._looks
    looks.share, HAPPENS[0] = 1.0, False
    assert isinstance(agent.train(1), events.SubEpochDone), "with a look"
    looks.spent, HAPPENS[0] = 1e9, True
    assert isinstance(agent.train(2), events.SubEpochDone), "without one"
    looks.spent = 0.0
    failed = agent.train(3)
    assert isinstance(failed, events.TaskFailed), failed
    assert "training changed attribute 'gains' of module '2' at ['w']" in failed.error


class Thaws(Event):
    """Has a frozen scale, which trains late."""

    def __init__(self) -> None:
        super().__init__(lambda self, _: self.still.requires_grad_(True))
        self.still = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.still


@pytest.mark.parametrize("shards", [1, 2])
def test_a_frozen_parameter_that_trains_late_is_told_by_its_name_and_not_by_the_optimizer(
    start: Callable[..., Agent], shards: int
) -> None:
    failed = start(lambda: made(Thaws(), shards=shards), share=0.0).train()
    assert isinstance(failed, events.TaskFailed), failed
    assert "training changed requires_grad of parameter '2.still' to True" in failed.error
