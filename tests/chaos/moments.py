"""Finds the moment at which a run is to be disturbed, in what its folder says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cerebro_hydra.errors import CerebroHydraError
from cerebro_hydra.observe.records import Decision
from cerebro_hydra.plan.messages.events import TrialAdded
from cerebro_hydra.plan.messages.instructions import Checkpoint, Commit, Evaluate, FetchShards
from cerebro_hydra.storage import RunFolder

LOOKS = 0.005
"""Seconds between two looks at a folder, which tells nobody of its changes."""


def run_of(store: Path) -> Path | None:
    """Return the folder of a store's only run, or None if it is not there yet."""
    return next(store.glob("runs/*"), None)


def decisions(run: Path) -> list[Decision]:
    """Return what the journal has by now."""
    return [Decision.from_json(line) for line in RunFolder.open(str(run)).read_records()]


@dataclass(frozen=True)
class Moment:
    """Names a moment, and says how many things of a kind the journal has by then.

    Args:
        kind: of instructions or events; None needs no journal.
        least, most: bounds of the number, drawn anew for every round.
        later: how many seconds may pass then.
    """

    name: str
    kind: type | None
    least: int
    most: int
    later: float = 0.05

    def wait(self, store: Path, draw: random.Random, over: Callable[[], bool]) -> None:
        """Return when it has come, or the driver has ended without it."""
        number, later = draw.randint(self.least, self.most), draw.uniform(0, self.later)
        before = 0  # segments of the journal
        while not over():
            run = run_of(store)
            segments = RunFolder.open(str(run)).journal_end()[1] if run else 0
            if run is not None and (self.kind is None or segments != before):
                before = segments
                if self.kind is None or self._count(run) >= number:
                    time.sleep(later)  # it is disturbed then, whatever it does
                    return
            time.sleep(LOOKS)

    def _count(self, run: Path) -> int:
        assert self.kind is not None
        try:
            made = decisions(run)
        except CerebroHydraError:  # segments are being merged
            return 0
        parts = (part for each in made for part in (each.event, *each.instructions))
        return sum(isinstance(part, self.kind) for part in parts)


VISITS = {"grid": 48, "best": 48, "rungs": 33}
"""Commits of a calm run of each kind."""

NAMES = (
    "the first second", "admission", "a hop", "an evaluation", "a checkpoint", "the last commit"
)  # fmt: skip


def moment_of(name: str, kind: str) -> Moment:
    """Return a moment of a run of a kind."""
    visits = VISITS[kind]
    return {
        "the first second": Moment(name, None, 0, 0, later=1.0),
        "admission": Moment(name, TrialAdded, 1, 3),
        "a hop": Moment(name, FetchShards, 1, 16),
        "an evaluation": Moment(name, Evaluate, 1, visits - 3),
        "a checkpoint": Moment(name, Checkpoint, 1, 11),
        "the last commit": Moment(name, Commit, visits, visits),
    }[name]
