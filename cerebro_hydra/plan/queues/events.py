"""Events tell the queues of a worker what happened; answers tell its shell what to do.

``WorkerState`` takes the events and gives actions (``plan/messages/actions.py``) or the answers
below. Every action but DROP, which takes no time, is answered once: RECV by ``ShardArrived``, the
others by ``ActionDone``, or all that a device had to do by its ``DeviceLost``. Actions of a
cancelled run are answered too. The shell hands in nothing of a lost device, and measures all
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.run_progress import RunSpec


@dataclass(frozen=True, slots=True)
class RunAdded:
    """The worker accepts a sub-epoch or an evaluation."""

    spec: RunSpec


@dataclass(frozen=True, slots=True)
class ShardArrived:
    """A shard's state lies whole in DRAM, where RECV made room for it."""

    run: int
    shard: int


@dataclass(frozen=True, slots=True)
class ActionDone:
    """A device or the host has done an action in ``seconds``, and moved ``nbytes``."""

    action: Action
    seconds: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class RunCancelled:
    """Nobody needs the run any more, or its own code has failed."""

    run: int


@dataclass(frozen=True, slots=True)
class RunReleased:
    """What a finished run has published is safe elsewhere, so the worker needs it no longer."""

    run: int


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """A device died with all that was in its memory, and what it was writing is torn."""

    device: int


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """A device is there again, and empty."""

    device: int


WorkerEvent = (
    RunAdded | ShardArrived | ActionDone | RunCancelled | RunReleased | DeviceLost | DeviceJoined
)


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run is over; ``reason`` says why a run was refused.

    A finished training run keeps its published shards in DRAM or on disk until ``RunReleased``.
    Of any other run the worker holds nothing, and what the shell has on disk of it can go.
    """

    run: int
    outcome: Literal["finished", "cancelled", "refused"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunRestarted:
    """The run begins anew, from the state before it, because changes were lost with a device."""

    run: int


Answer = Action | RunEnded | RunRestarted
