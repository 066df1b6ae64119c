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
from cerebro_hydra.plan.schedules.gpipe import gpipe
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.interleaved import interleaved
from cerebro_hydra.plan.schedules.one_forward_one_backward import one_forward_one_backward
from cerebro_hydra.plan.schedules.pick import PICKS
from cerebro_hydra.plan.schedules.pipedream import check_pipedream, pipedream
from cerebro_hydra.plan.schedules.sequential import sequential
from cerebro_hydra.plan.schedules.two_buffers import two_buffers

Schedule = Callable[[TaskGraph, int, int, int], Sequence[Sequence[Action]]]

SCHEDULES: Mapping[str, Schedule] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}
"""The names that the schedule of a trial may have."""

ORDERS: Mapping[str, Schedule] = {**SCHEDULES, "pipedream": pipedream, "2bw": two_buffers}
"""Those, and the schedules that are decided and simulated, but that no agent trains by yet."""


def is_pipelined(schedule: str) -> bool:
    """Return whether a schedule may have several microbatches under way at once."""
    return schedule != "sequential"


def check_schedule(name: object, clips_norm: bool = False, accumulate: int = 1) -> None:
    """Check what a user gave as the schedule of a trial, with the settings that may exclude it.

    Raises:
        ConfigurationError: there is no such schedule, or it can't be used with them; the message
            says what to give instead.
    """
    if isinstance(name, str) and name in PICKS:
        raise ConfigurationError(
            f"schedule is {name!r}, which is how devices choose among trials; leave schedule out, "
            f"and give the backend pick={name!r}"
        )
    if name == "pipedream":
        check_pipedream(clips_norm, accumulate)
    if isinstance(name, str) and name in ORDERS.keys() - SCHEDULES.keys():
        raise ConfigurationError(
            f"schedule is {name!r}, by which no agent trains yet: it has only been simulated; take "
            f"one of {list(SCHEDULES)}"
        )
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ConfigurationError(f"schedule is {name!r}; it is one of {list(SCHEDULES)}")
