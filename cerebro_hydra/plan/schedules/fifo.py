"""First in, first out: a device takes the run that has waited longest, to compare SHARP with."""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.schedules.candidate import Candidate


def fifo(candidates: Sequence[Candidate]) -> Candidate:
    """Pick the run that has waited longest, then the older one."""
    return min(candidates, key=lambda each: (each.own, each.waiting_since, each.order))
