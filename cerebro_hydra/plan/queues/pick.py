"""A pick is the rule by which a free device chooses among the visits of several trials.

A candidate is a visit whose next unit the device may take; a rule picks one of several, or none. A
backend names a rule of `PICKS`. In which order a visit does its own tasks is up to its schedule.

SHARP lets each device take the visit with the longest remaining time: sharded-LRTF (Nagrecha and
Kumar, "Hydra: A System for Large Multi-Model Deep Learning", 2021). The queues serve every idle
device before they reserve a unit for a busy one, and the running visit's own next unit competes for
that reservation. ::

    3 visits of 2 shards, 1 microbatch, F=1 B=2, promotion 0.5:
    device 0   t0s0F0@.5  t2s0F0@1.5 t2s1F0@2.5 t2s1B0@3.5 t1s1B0@5.5 t1s0B0@7.5
    device 1   t1s0F0@.5  t1s1F0@1.5 t0s1F0@2.5 t0s1B0@3.5 t0s0B0@5.5 t2s0B0@7.5   ends at 9.5
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cerebro_hydra.plan.queues.outlook import Outlook


@dataclass(frozen=True, slots=True)
class Candidate:
    """Tells what a rule may know of a visit.

    Args:
        visit: its number.
        arrival: its place among the visits of the worker.
        remaining: the estimated seconds of the tasks that no device has taken.
        waiting_since: the count of events at the end of its last unit.
        own: whether the device is running the unit before.
    """

    visit: int
    arrival: int
    remaining: float
    waiting_since: int
    own: bool


Ahead = Callable[[], Outlook | None]
"""Tells what a device can expect; None while too much is left to look ahead."""

Rule = Callable[[Sequence[Candidate], Ahead], Candidate | None]


def unforeseen() -> None:
    """Tell nothing of what a device can expect."""


def oldest_first(candidates: Sequence[Candidate], ahead: Ahead = unforeseen) -> Candidate:
    """Pick the visit that came first, so that visits are done one after the other."""
    return min(candidates, key=lambda candidate: candidate.arrival)


def sharp(candidates: Sequence[Candidate], ahead: Ahead = unforeseen) -> Candidate | None:
    """Pick the longest remaining time, or near the end what a look ahead finds to be better.

    A tie goes to the running visit, then to the older one.
    """
    outlook = ahead()
    if outlook is None:
        return max(candidates, key=_preference)
    by_visit = {each.visit: each for each in sorted(candidates, key=_preference, reverse=True)}
    best = outlook.best([*by_visit])
    return None if best is None else by_visit[best]


def _preference(candidate: Candidate) -> tuple[float, bool, int]:
    return candidate.remaining, candidate.own, -candidate.arrival


PICKS: Mapping[str, Rule] = {"oldest_first": oldest_first, "sharp": sharp}
"""The rules that a backend may name."""

DEFAULT_PICK = "oldest_first"
"""The rule of a backend that names none; `benchmarks/sharp/README.md` compares them."""
