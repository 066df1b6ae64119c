"""1F1B begins backwards as soon as they can be, so that a device keeps few microbatches.

Each device has a range of shards. It does as many forwards as there are devices behind it, then a
forward and a backward in turn, then the backwards that are left; so it keeps what one microbatch
more than there are devices behind it leaves, however many a window has. Its devices wait as long
as GPipe's. Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021,
section 3.2 (PipeDream-Flush).
"""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph


def one_forward_one_backward(
    graph: TaskGraph, visit: int, window: int, devices: int
) -> Sequence[Sequence[Action]]:
    """Return a list for each device."""
    # 2 shards, 4 microbatches    device 0   F0 F1 .  B0 F2 B1 F3 B2 .  B3 U3
    #                             device 1   .  F0 B0 F1 B1 F2 B2 F3 B3 U3
    microbatches = graph.window_of(window * graph.window)
    stages = graph.stages(devices)
    lists = []
    for place, stage in enumerate(stages):
        ahead = min(len(stages) - 1 - place, len(microbatches))
        passes: list[Action] = []
        for number in range(len(microbatches) + ahead):
            if number < len(microbatches):
                m = microbatches[number]
                passes += [Action(visit, k, ActionKind.F, m) for k in stage]
            if number >= ahead:
                m = microbatches[number - ahead]
                passes += [Action(visit, k, ActionKind.B, m) for k in reversed(stage)]
        lists.append(graph.with_updates(passes))
    return lists
