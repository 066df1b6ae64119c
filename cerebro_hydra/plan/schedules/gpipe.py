"""GPipe gives each device a range of shards, and does all forwards of a window, then all backwards.

While a device does a microbatch, the next device does the one before. It waits for (S - 1) of
(M + S - 1) parts of its time, with S devices, M microbatches and equal tasks. A device keeps what
M microbatches leave between their forward and their backward. Source: Huang et al., "GPipe:
Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph


def gpipe(graph: TaskGraph, visit: int, window: int, devices: int) -> Sequence[Sequence[Action]]:
    """Return a list for each device."""
    # 2 shards, 4 microbatches    device 0   F0 F1 F2 F3 .  .  B0 B1 B2 B3 U3
    #                             device 1   .  F0 F1 F2 F3 B0 B1 B2 B3 U3
    microbatches = graph.window_of(window * graph.window)
    return [
        graph.with_updates(
            [Action(visit, k, ActionKind.F, m) for m in microbatches for k in stage]
            + [Action(visit, k, ActionKind.B, m) for m in microbatches for k in reversed(stage)]
        )
        for stage in graph.stages(devices)
    ]
