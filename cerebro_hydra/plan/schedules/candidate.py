"""A candidate is a run whose next unit a device may take; a rule picks one of several, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """Tells what a rule may know of a run.

    Args:
        run: its number.
        order: its place among the runs of the worker, by arrival.
        remaining: the estimated seconds of the tasks that no device has taken.
        waiting_since: the count of events at the end of its last unit.
        own: whether the device is running the unit before.
    """

    run: int
    order: int
    remaining: float
    waiting_since: int
    own: bool


Rule = Callable[[Sequence[Candidate]], Candidate | None]


def oldest_first(candidates: Sequence[Candidate]) -> Candidate:
    """Pick the run that came first, so that runs are done one after the other."""
    return min(candidates, key=lambda candidate: candidate.order)
