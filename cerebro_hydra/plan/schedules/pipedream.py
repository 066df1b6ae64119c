"""PipeDream goes on over the updates of a sub-epoch, so that devices wait at its ends alone.

The order is 1F1B's over all microbatches of a sub-epoch, and each is updated with right after its
backward. So a forward finds weights that do not have the updates of the microbatches before it
which are still under way behind it. Its backward reads the same weights, which its device keeps
until then: weight stashing. Of d devices, device s is d - 1 - s updates behind and keeps d - s
versions. With vertical sync, all devices read the version that the first one reads, and each keeps
d. Devices wait for (d - 1) of (n + d - 1) parts of a sub-epoch of n microbatches. Source: Narayanan
et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph


def pipedream(
    graph: TaskGraph, visit: int, window: int, devices: int
) -> Sequence[Sequence[Action]]:
    """Return a list for each device: what it does until the update of the window."""
    # 2 shards, 4 microbatches    device 0   F0 F1 .  B0 U0 F2 B1 U1 F3 B2 U2 .  B3 U3
    #                             device 1   .  F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3
    # reads versions, stashing    0 0 1 2 on device 0, 0 1 2 3 on device 1
    #                 in sync     0 0 1 2 on both
    updated = graph.window_of(window * graph.window)
    stages = graph.stages(devices)
    lists = []
    for place, stage in enumerate(stages):
        ahead = min(len(stages) - 1 - place, graph.microbatches)
        passes: list[Action] = []
        for number in range(updated.start + (ahead if window else 0), updated.stop + ahead):
            if number < graph.microbatches:
                passes += [Action(visit, k, ActionKind.F, number) for k in stage]
            if number >= ahead:
                back = number - ahead
                passes += [Action(visit, k, ActionKind.B, back) for k in reversed(stage)]
        lists.append(graph.with_updates(passes))
    return lists


def pipedream_graph(graph: TaskGraph, devices: int, vertical_sync: bool = False) -> TaskGraph:
    """Return the graph with the versions that PipeDream reads on so many devices.

    Raises:
        ConfigurationError: what the graph demands can't be had; the message says why.
    """
    check_pipedream(clips_norm=graph.barrier, accumulate=graph.window)
    stages = graph.stages(devices)
    last = len(stages) - 1
    places = [place for place, stage in enumerate(stages) for _ in stage]
    for members in graph.tied:
        apart = sorted({places[member] for member in members})
        if len(apart) > 1 and not vertical_sync:
            raise ConfigurationError(
                f"schedule is 'pipedream' and shards {sorted(members)} share a parameter, of which "
                f"stages {apart} would read different versions; take vertical_sync=True, or cut "
                "the model so that one stage has all of them"
            )
    behind = tuple(last if vertical_sync else last - place for place in places)
    return replace(graph, staleness=behind)


def check_pipedream(clips_norm: bool, accumulate: int) -> None:
    """Check the settings of a trial that is to be trained by PipeDream.

    Raises:
        ConfigurationError: a setting can't be used with it; the message says why.
    """
    if clips_norm:
        raise ConfigurationError(
            "schedule is 'pipedream' and clip_grad_norm is given, which lets every update wait for "
            "the gradients of all stages, so that one batch at a time would be under way; take "
            "schedule='1f1b', which clips where it waits anyway"
        )
    if accumulate > 1:
        raise ConfigurationError(
            f"schedule is 'pipedream' and accumulate is {accumulate}, and PipeDream updates after "
            "every batch; take schedule='1f1b', which accumulates"
        )
