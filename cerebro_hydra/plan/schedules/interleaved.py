"""Interleaved 1F1B gives each device several ranges of shards, so that it waits less.

With S devices that have V ranges each, M microbatches and equal tasks, a device waits for (S - 1)
of (V M + S - 1) parts of its time, and boundary values cross V times as often. Microbatches go in
rounds of about S through the ranges; where rounds don't divide a window, it takes one round.
Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.one_forward_one_backward import one_forward_one_backward


def interleaved(
    graph: TaskGraph, visit: int, window: int, devices: int
) -> Sequence[Sequence[Action]]:
    """Return a list for each device; with a range for each it is 1F1B."""
    # 4 shards,        device 0   s0F0 s0F1 s2F0 s2F1 .    s2B0 .    s2B1 s0B0 s0B1
    # 2 microbatches   device 1   .    s1F0 s1F1 s3F0 s3B0 s3F1 s3B1 s1B0 s1B1 .
    devices = min(devices, graph.most_stages)
    ranges = graph.most_stages // devices
    if ranges == 1:
        return one_forward_one_backward(graph, visit, window, devices)
    stages = graph.stages(ranges * devices)
    microbatches = graph.window_of(window * graph.window)
    rounds = max(1, len(microbatches) // devices)
    size = len(microbatches) // (1 if len(microbatches) % rounds else rounds)
    total = ranges * len(microbatches)

    def passes(place: int) -> Iterator[Action]:
        ahead = min((ranges - 1) * size + 2 * (devices - 1 - place), total)
        for number in range(total + ahead):
            if number < total:
                stage, m = at(place, number, forward=True)
                yield from (Action(visit, k, ActionKind.F, m) for k in stage)
            if number >= ahead:
                stage, m = at(place, number - ahead, forward=False)
                yield from (Action(visit, k, ActionKind.B, m) for k in reversed(stage))

    def at(place: int, number: int, forward: bool) -> tuple[range, int]:
        """Return the stage and the microbatch of a device's n-th forward or backward."""
        round_, within = divmod(number, size * ranges)
        chunk, m = divmod(within, size)
        chunk = chunk if forward else ranges - 1 - chunk
        return stages[chunk * devices + place], microbatches[round_ * size + m]

    return [graph.with_updates(list(passes(place))) for place in range(devices)]
