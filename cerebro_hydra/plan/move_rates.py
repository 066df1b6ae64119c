"""Tells how long it takes to move a shard between the tiers of a worker."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cerebro_hydra.plan.actions import HOST, Action, ActionKind


@dataclass(frozen=True, slots=True)
class MoveRates:
    """Holds bytes per second, each way: between DRAM and a device, and between disk and DRAM."""

    device: float = math.inf
    disk: float = math.inf

    def seconds(self, action: Action, nbytes: int) -> float:
        """Return how long a LOAD or SPILL of these bytes takes; transfers elsewhere count nothing.

        They go on while other runs compute, and the estimates of a hop have them.
        """
        if action.kind not in (ActionKind.LOAD, ActionKind.SPILL):
            return 0.0
        return nbytes / (self.disk if action.device == HOST else self.device)


FREE_MOVES = MoveRates()
"""Moves that take no time."""
