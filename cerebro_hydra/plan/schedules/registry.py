"""The schedules by name: in which order a trial does its own shard tasks, and on which devices.

A schedule is a function of a task graph, a visit, the number of a window and the number of devices.
It returns lists of the window's tasks. If there are several, list k is what device k does; if there
is one, any device may do its next task. A list is done in its own order: its first task begins once
`TaskGraph.needs` says that it is ready, and whatever comes later waits behind it. So a schedule
decides how many microbatches are under way at once, and with them the bytes that a device keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.schedules.forward_only import forward_only
from cerebro_hydra.plan.schedules.gpipe import gpipe
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.interleaved import interleaved
from cerebro_hydra.plan.schedules.one_forward_one_backward import one_forward_one_backward
from cerebro_hydra.plan.schedules.pipedream import (
    check_pipedream,
    pipedream,
    pipedream_graph,
)
from cerebro_hydra.plan.schedules.sequential import sequential
from cerebro_hydra.plan.schedules.two_buffers import two_buffers, two_buffers_graph

Schedule = Callable[[TaskGraph, int, int, int], Sequence[Sequence[Action]]]

FLUSHED: Mapping[str, Schedule] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}
"""Those by which an update waits for whatever was begun before it: they change no result."""

SCHEDULES: Mapping[str, Schedule] = {**FLUSHED, "pipedream": pipedream, "2bw": two_buffers}
"""The names that the schedule of a trial may have."""


def schedule_of(name: str, training: bool) -> Schedule:
    """Return what orders the tasks of a visit of a trial with this schedule."""
    return SCHEDULES[name] if training or not is_pipelined(name) else forward_only


def is_pipelined(schedule: str) -> bool:
    """Return whether a schedule may have several microbatches under way at once."""
    return schedule != "sequential"


def is_flushed(schedule: str) -> bool:
    """Return whether tasks read the weights that they read in plain training."""
    return schedule in FLUSHED


def check_schedule(
    name: object,
    clips_norm: bool = False,
    accumulate: int = 1,
    vertical_sync: bool = False,
    scales: bool = False,
    replicas: int | str = 1,
) -> None:
    """Check what a user gave as the schedule of a trial, with the settings that may exclude it.

    Raises:
        ConfigurationError: there is no such schedule, or it can't be used with them; the message
            says what to give instead.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ConfigurationError(f"schedule is {name!r}; it is one of {list(SCHEDULES)}")
    if vertical_sync and name != "pipedream":
        raise ConfigurationError(
            f"vertical_sync is True and schedule is {name!r}, by which all stages read the same "
            "version in any case; leave vertical_sync out, or take schedule='pipedream'"
        )
    if replicas != 1 and is_pipelined(name):
        raise ConfigurationError(
            f"replicas is {replicas!r} and schedule is {name!r}, and a replica trains on one "
            "device of its worker; take schedule='sequential', or leave replicas out"
        )
    if name == "pipedream":
        check_pipedream(clips_norm, accumulate)
    if scales and not is_flushed(name):
        raise ConfigurationError(
            f"schedule is {name!r} and autocast is 'float16', whose losses are scaled by what came "
            "of the update before, so that the batches of one update at a time would be under way; "
            "take autocast='bfloat16', which scales none, or schedule='1f1b'"
        )


def with_versions(
    graph: TaskGraph, schedule: str, devices: int, vertical_sync: bool = False
) -> TaskGraph:
    """Return the graph with the versions of weights that a schedule reads on so many devices.

    Raises:
        ConfigurationError: what the graph demands can't be had; the message says why.
    """
    if is_flushed(schedule):
        return graph
    if schedule == "pipedream":
        return pipedream_graph(graph, devices, vertical_sync)
    return two_buffers_graph(graph, devices)
