"""Tells how long the actions of a worker take, by the speed of its tiers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cerebro_hydra.plan.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.run_progress import ShardSpec


@dataclass(frozen=True, slots=True)
class MoveRates:
    """Holds bytes per second, each way: between DRAM and a device, and between disk and DRAM."""

    device: float = math.inf
    disk: float = math.inf

    def seconds(self, action: Action, shard: ShardSpec) -> float:
        """Return how long an action on the shard takes; transfers to other workers count nothing.

        They go on while other runs compute, and the seconds of a hop have them.
        """
        if action.kind.computes:
            return shard.seconds(action.kind)
        if action.kind not in (ActionKind.LOAD, ActionKind.SPILL):
            return 0.0
        return shard.state / (self.disk if action.device == HOST else self.device)


FREE_MOVES = MoveRates()
"""Moves that take no time."""
