"""Where each step sets what the trials of a process share, no other trial may come between."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import AdmittedCut, admit
from tests.agent.late_events import made
from tests.agent.lone_agent import BATCH

LOSSES: list[Tensor] = []
HELD: dict[str, Any] = {}
SPACE = SimpleNamespace()
SCALE: Any = None
TABLE: Tensor | None = None


@pytest.fixture(autouse=True)
def begun() -> None:
    """Let all be as in a process that has just begun."""
    global SCALE, TABLE
    LOSSES.clear()
    HELD.clear()
    HELD.update(scale=None)
    SPACE.parts, SCALE, TABLE = [], None, None


class Model(nn.Module):
    """Has a block that sets something, and one that computes with it."""

    def __init__(self, sets: Callable[[Tensor], object], reads: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.begin, self.set, self.read = nn.Linear(16, 16), Calls(sets), Calls(reads)

    def forward(self, x: Tensor) -> Tensor:
        self.set(x := self.begin(x))
        return self.read(x)  # type: ignore[no-any-return]


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(self.linear(x))
        return found if isinstance(found, Tensor) else x


def collects(x: Tensor) -> None:
    LOSSES.clear()
    LOSSES.append(x.pow(2).mean())


def replaces(x: Tensor) -> None:
    SPACE.parts = []
    SPACE.parts.append(x.pow(2).mean())


def rebinds(x: Tensor) -> None:
    global SCALE
    SCALE = 0.5


def sets_an_entry(x: Tensor) -> None:
    HELD["scale"] = 0.5


def looks_up(x: Tensor) -> None:
    HELD.setdefault(f"{len(x)} rows", torch.ones(len(x), 1))


def makes_once(x: Tensor) -> None:
    global TABLE
    if TABLE is None:
        TABLE = torch.ones(16)


ANEW = {
    "collects": (collects, lambda x: x * sum(LOSSES)),
    "replaces": (replaces, lambda x: x * sum(SPACE.parts)),
    "rebinds": (rebinds, lambda x: x * SCALE),
    "sets an entry": (sets_an_entry, lambda x: x * HELD["scale"]),
}
CACHES = {
    "looks up": (looks_up, lambda x: x * HELD[f"{len(x)} rows"]),
    "makes once": (makes_once, lambda x: x * TABLE),
}


def recipe(sets: Any, reads: Any) -> Recipe:
    torch.manual_seed(3)
    return made(Model(sets, reads), shards=3)


def admitted(sets: Any, reads: Any) -> AdmittedCut:
    features, labels = torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))
    return admit(recipe(sets, reads), [((features,), (labels,))], 7)


@pytest.mark.parametrize("kind", ANEW)
def test_a_model_that_sets_what_trials_share_is_one_shard(kind: str) -> None:
    cut = admitted(*ANEW[kind])
    assert len(cut.report.shards) == 1
    assert "which the trials of a process share" in str(cut.report.fallback)


class Holds(Calls):
    """Has as an attribute what trials share, and sets another value there in each step."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__(function)
        self.held = HELD

    def forward(self, x: Tensor) -> Tensor:
        self.held["scale"] = x.detach().mean().item()
        return super().forward(x)


def test_a_model_that_has_it_as_an_attribute_is_one_shard_too() -> None:
    torch.manual_seed(3)
    model = Model(lambda x: None, lambda x: x * HELD["scale"])
    model.set = Holds(lambda x: None)
    features, labels = torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))
    cut = admit(made(model, shards=3), [((features,), (labels,))], 7)
    assert len(cut.report.shards) == 1
    assert "which the trials of a process share" in str(cut.report.fallback)


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_trials_share_keeps_no_model_from_being_cut(kind: str) -> None:
    assert len(admitted(*CACHES[kind]).report.shards) == 3
