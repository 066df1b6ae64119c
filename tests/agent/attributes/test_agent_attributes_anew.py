"""An agent begins each sub-epoch and evaluation with attributes as the model was built."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.held_state import SetBefore
from tests.agent.late_events import HAPPENS, RARE, made
from tests.agent.lone_agent import Agent


class SetsAnew(nn.Module):
    """Sets a number in each forward, which is another one late, and depends on no history."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        self.scale = 0.5 if self.steps > RARE and HAPPENS[0] else 1.0
        return x * self.scale


class BeginsWith(SetsAnew):
    """Has a scale before its first forward."""

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.scale = scale  # type: ignore[assignment]


class TableOfLengths(SetsAnew):
    """Makes a table once, and a longer one when there are more rows than in it."""

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x) + int(self.steps > RARE and HAPPENS[0])
        if not hasattr(self, "table") or len(self.table) < rows:
            self.table = torch.ones(rows, 1)
        return super().forward(x * self.table[: len(x)])


class LongestSoFar(TableOfLengths):
    """Keeps how long its table is."""

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x) + int(self.steps > RARE and HAPPENS[0])
        if not hasattr(self, "longest") or rows > self.longest:
            self.longest, self.kind = rows, f"{x.dtype}"
        return super().forward(x)


class KeepsByKey(SetsAnew):
    """Makes a table for each number of rows that is another one than before."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.table = 0, None

    def forward(self, x: Tensor) -> Tensor:
        if self.rows != len(x):
            self.rows, self.table = len(x), torch.ones(len(x), 1)
        return super().forward(x * self.table)


class KeepsByName(SetsAnew):
    """Makes a table for each name of its rows' number."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        name = f"{len(x) + int(self.steps > RARE and HAPPENS[0])} rows"
        return super().forward(x * self.tables.setdefault(name, torch.ones(len(x), 1)))


class KeepsForALog(SetsAnew):
    """Keeps when and with which rows and weights it began, with which nothing computes."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.first_rows, self.first_norm = None, None, 0.0
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.began is None and self.training:
            self.began, self.first_rows = time.time(), x.detach().clone()
            self.first_norm = self.weight.norm().item()
        return super().forward(x * self.weight)


class FillsOnce(nn.Module):
    """Fills a list, a dict, a tensor, an iterator's place and hooks in its first forward.

    Args:
        filled: whether that was done before.
    """

    def __init__(self, filled: bool) -> None:
        super().__init__()
        self.ready, self.parts, self.named = False, [0.25], {"a": 1.0}
        self.mask, self.numbers = torch.ones(16), iter([0.5, 2.0, 3.0])
        self.hooked = nn.Identity()
        if filled:
            self.fill()

    def fill(self) -> None:
        self.ready = True
        self.parts.append(next(self.numbers))
        self.named["b"] = self.named["a"] / 2
        self.mask.mul_(0.5)
        self.hooked.register_forward_hook(lambda module, given, output: output * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.fill()
        x = self.hooked(x)
        return x * sum(self.parts) * sum(self.named.values()) * self.mask


@pytest.mark.parametrize("share", [0.0, 0.01])
@pytest.mark.parametrize("shards", [1, 2])
def test_what_the_first_step_changes_in_place_is_done_once_in_each_sub_epoch_and_evaluation(
    start: Callable[..., Agent], shards: int, share: float
) -> None:
    found = []
    for filled in (False, True):
        agent = start(lambda: made(FillsOnce(filled), shards=shards), share=0.0)  # noqa: B023
        agent.runs._looks.share = share
        for state in (1, 2):
            done, measured = agent.train(state), agent.evaluate(state)
            assert isinstance(done, events.SubEpochDone), done
            assert isinstance(measured, events.EvaluationDone), measured
            assert done.digests == agent.known(state)
            found.append((done.digests, measured.sums))
    assert found[:2] == found[2:]


class MakesInSlot(SetsAnew):
    """Makes a number in a slot, not among its attributes."""

    __slots__ = ("made",)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.made = 1.0
        return super().forward(x * self.made)


class CopiesALayer(nn.Sequential):
    """Copies a module in each forward, with the hooks that it has by now."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        copied, hooks = copy.deepcopy(self[0]), self[0]._forward_pre_hooks
        assert list(copied._forward_pre_hooks.values()) == list(hooks.values())
        return self[0](x) + copied(x).detach()


ANEW = [
    SetsAnew, TableOfLengths, LongestSoFar, KeepsByKey, KeepsByName, KeepsForALog, MakesInSlot,
    CopiesALayer,
]  # fmt: skip


@pytest.mark.parametrize("middle", ANEW)
@pytest.mark.parametrize("shards", [1, 2])
def test_what_later_steps_set_without_a_history_is_no_harm(
    start: Callable[..., Agent], middle: type[nn.Module], shards: int
) -> None:
    agent = start(lambda: made(middle(), shards=shards), share=0.0)
    agent.runs._looks.share = 0.01
    for state in (1, 2):
        done = agent.train(state)
        assert isinstance(done, events.SubEpochDone), done
        measured = agent.evaluate(state)
        assert isinstance(measured, events.EvaluationDone), measured


@pytest.mark.parametrize("scale", [1.0, None])
@pytest.mark.parametrize("shards", [1, 2])
def test_the_sentence_of_what_every_forward_sets_says_how_its_trial_trains(
    start: Callable[..., Agent], shards: int, scale: float | None
) -> None:
    agent = start(lambda: made(BeginsWith(scale), shards=shards), share=0.0)
    agent.runs._looks.share = 0.01
    trained = agent.train()
    if scale is None:
        assert isinstance(trained, events.SubEpochDone), trained
    else:
        assert isinstance(trained, events.TaskFailed), trained
        assert "let every forward set it anew, with None before the first one" in trained.error


class SetsUntil(SetsAnew):
    """Sets a number in each forward until an event, which it then keeps."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        if not (self.steps > RARE and HAPPENS[0]):
            self.scale = 1.0
        elif self.steps == RARE + 1:
            self.scale = 0.5
        return x * self.scale


@pytest.mark.parametrize("uncut", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_what_each_step_sets_and_a_late_one_keeps_fails_its_trial_by_name(
    start: Callable[..., Agent], shards: int, uncut: bool
) -> None:
    agent = start(lambda: made(SetsUntil(), shards=shards), share=0.0)
    agent.runs._looks.share = 0.01
    assert isinstance(agent.train(1, uncut), events.SubEpochDone), "it is kept from here on"
    failed = agent.train(2, uncut)
    assert isinstance(failed, events.TaskFailed), failed
    assert "training reads attribute 'scale' of module '2' before it sets it" in failed.error


@pytest.mark.parametrize("built", [{}, {"scale": None}])
def test_a_sub_epoch_that_ends_before_its_first_step_takes_no_attribute_away(
    start: Callable[..., Agent], built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Recipe:
        recipe = made(SetsAnew())
        vars(recipe.model[2]).update(built)
        return recipe

    agent = start(make, share=0.0)
    agent.runs._looks.share = 0.01
    orders, open_visit = [], agent.runs.open
    monkeypatch.setattr(agent.runs, "open", lambda order: orders.append(order) or open_visit(order))
    assert isinstance(agent.train(1), events.SubEpochDone)
    (order,), held = orders, vars(agent.builder.get(0).runtime.recipe.model[2])
    assert isinstance(held["scale"], float)
    visit = open_visit(order)
    assert isinstance(held["scale"], SetBefore)
    visit.cancel()
    assert {name: held[name] for name in ("scale",) if name in held} == built
