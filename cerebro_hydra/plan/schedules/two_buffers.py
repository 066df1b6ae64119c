"""PipeDream-2BW accumulates over a window and keeps two versions of weights on every device.

The order is PipeDream's, 1F1B over all microbatches of a sub-epoch, with an update after the last
backward of each window. Every device reads, for a window, the weights from before the window
before it; so the first two windows both read version 0, and two versions are kept whatever the
number of devices. Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML
2021, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.pipedream import pipedream


def two_buffers(
    graph: TaskGraph, visit: int, window: int, devices: int
) -> Sequence[Sequence[Action]]:
    """Return a list for each device: what it does until the update of the window."""
    # 2 shards, 6 microbatches    device 0   F0 F1 .  B0 F2 B1 U1 F3 B2 F4 B3 U3 F5 B4 .  B5 U5
    # in windows of 2             device 1   .  F0 B0 F1 B1 U1 F2 B2 F3 B3 U3 F4 B4 F5 B5 U5
    # reads versions              0 0 0 0 1 1 on both
    return pipedream(graph, visit, window, devices)


def two_buffers_graph(graph: TaskGraph, devices: int) -> TaskGraph:
    """Return the graph with the versions that 2BW reads.

    Clipping by the norm of all gradients lets devices wait for one another before each update.

    Raises:
        ConfigurationError: a window has too few microbatches for so many devices.
    """
    stages = len(graph.stages(devices))
    if graph.window < stages - 1:
        raise ConfigurationError(
            f"schedule is '2bw' and accumulate is {graph.window}, and a forward on the first of "
            f"{stages} stages would need weights that are not made before it; take an accumulate "
            f"of at least {stages - 1}, or fewer stages"
        )
    return replace(graph, staleness=(1,) * graph.shards)
