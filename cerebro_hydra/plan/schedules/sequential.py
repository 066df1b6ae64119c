"""The sequential schedule does one shard task at a time, in the order of plain training."""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.schedules.graph import TaskGraph


def sequential(
    graph: TaskGraph, visit: int, window: int, devices: int
) -> Sequence[Sequence[Action]]:
    """Return one list, whose next task any device may take."""
    # 3 shards, 2 microbatches     F0 F1 F2 B2 B1 B0 F0 F1 F2 B2 U2 B1 U1 B0 U0
    return [graph.tasks(visit, window)]
