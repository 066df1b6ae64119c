"""An evaluation goes over the devices of a pipeline as its forwards do, whatever its schedule."""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph


def forward_only(
    graph: TaskGraph, visit: int, window: int, devices: int
) -> Sequence[Sequence[Action]]:
    """Return a list for each device: what it does of the microbatches of a window."""
    # 2 shards, 3 windows of a microbatch    device 0   F0 F1 F2 .
    #                                        device 1   .  F0 F1 F2
    microbatches = graph.window_of(window * graph.window)
    return [
        [Action(visit, k, ActionKind.F, m) for m in microbatches for k in stage]
        for stage in graph.stages(devices)
    ]
