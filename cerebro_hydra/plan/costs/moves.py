"""The speeds of what bytes are moved over: between tiers of a worker, and between workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.visit_spec import ShardSpec

_FEW_TIMES = 4.0
"""By how much the sizes of hops must differ, so that their times tell the speed of the wire."""


@dataclass(frozen=True, slots=True)
class MoveRates:
    """Holds bytes per second, each way, and the seconds that do not depend on bytes.

    Args:
        device: between DRAM and a device.
        disk: between disk and DRAM.
        wire: between workers.
        latency: seconds of a hop of no bytes.
        dispatch: those that each unit of tasks and each LOAD or SPILL costs the cores of a worker
            beside its work: its order, its answer, and the decision between them. The bill counts
            them where devices compute on these cores.
    """

    device: float = math.inf
    disk: float = math.inf
    wire: float = math.inf
    latency: float = 0.0
    dispatch: float = 0.0

    def seconds(self, action: Action, shard: ShardSpec) -> float:
        """Return how long an action on the shard takes; transfers to other workers count nothing.

        They go on while other visits compute, and the seconds of a hop have them.
        """
        if action.kind.computes:
            return shard.seconds(action.kind)
        if action.kind not in (ActionKind.LOAD, ActionKind.SPILL):
            return 0.0
        return shard.moved(action) / (self.disk if action.device == HOST else self.device)

    def hop_seconds(self, nbytes: int) -> float:
        """Return how long a hop of so many bytes takes."""
        return self.latency + nbytes / self.wire

    def exchange_seconds(self, nbytes: int, replicas: int) -> float:
        """Return how long replicas wait at most for the sum of gradients of so many bytes.

        Their buckets go along the chain and back at once; the last one of them goes all the way.
        """
        return 2 * (replicas - 1) * self.latency + nbytes / self.wire


DISPATCH_SECONDS = 0.0007
"""What a dispatch costs the cores of a worker of CPU devices; `benchmarks/gap` measures it."""

FREE_MOVES = MoveRates()
"""Moves that take no time."""


def wire_of(hops: Sequence[tuple[int, float]], known: float) -> tuple[float, float]:
    """Return the bytes per second between workers and the latency, from hops by bytes and seconds.

    A line is laid through the middle of the smaller half and that of the larger half. Where the
    sizes differ too little for that, the speed that is known is taken.
    """
    found = sorted(hop for hop in hops if hop[1] > 0)
    if not found:
        return known, 0.0
    half = max(1, len(found) // 2)
    (few, soon), (many, late) = (
        (median(nbytes for nbytes, _ in part), median(seconds for _, seconds in part))
        for part in (found[:half], found[-half:])
    )
    rate = known
    if late > soon and many >= _FEW_TIMES * max(few, 1):
        rate = (many - few) / (late - soon)
    return rate, max(0.0, median(seconds - nbytes / rate for nbytes, seconds in found))
