"""How a trial trains by a plan, among the choices that change no bit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Says how a trial trains; where it is cut is in its document in any case.

    Workers that can't follow it train the trial as if there were none, to the same bits.

    Args:
        schedule: a synchronous one.
        recompute: whether activations are computed again.
        devices: over how many devices of a worker the schedule spreads a visit.
    """

    schedule: str = "sequential"
    recompute: bool = False
    devices: int = 1
