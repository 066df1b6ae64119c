"""Events tell the queues of a worker what happened; answers tell its shell what to do.

``WorkerState`` takes the events and gives actions (``plan/messages/actions.py``) or the answers
below. The tasks of a unit, which a device does one after the other, are a tuple; a device does its
units in the order in which they were given. Every action but DROP, which takes no time, is answered
once: RECV by ``ShardArrived``, the others by ``ActionDone``, or all that a device had to do by its
``DeviceLost``. Actions of a
cancelled visit are answered too. The shell hands in nothing of a lost device, and measures all
seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.visit_spec import VisitSpec


@dataclass(frozen=True, slots=True)
class VisitAdded:
    """The worker accepts a sub-epoch or an evaluation."""

    spec: VisitSpec


@dataclass(frozen=True, slots=True)
class ShardArrived:
    """A shard's state lies whole in DRAM, where RECV made room for it."""

    visit: int
    shard: int


@dataclass(frozen=True, slots=True)
class ActionDone:
    """A device or the host has done an action in ``seconds``, and moved ``nbytes``."""

    action: Action
    seconds: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class VisitCancelled:
    """Nobody needs the visit any more, or its own code has failed."""

    visit: int


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """A device died with all that was in its memory, and what it was writing is torn."""

    device: int


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """A device is there again, and empty."""

    device: int


@dataclass(frozen=True, slots=True)
class VisitsExpected:
    """Whether other visits may follow those that the worker has, which is so at first."""

    expected: bool


WorkerEvent = (
    VisitAdded
    | ShardArrived
    | ActionDone
    | VisitCancelled
    | DeviceLost
    | DeviceJoined
    | VisitsExpected
)


@dataclass(frozen=True, slots=True)
class VisitEnded:
    """The visit is over; ``reason`` says why a visit was refused.

    What a training visit has published is kept (``Ledger.keep``), whatever becomes of the visit.
    The queues hold nothing else of it, and what the shell has on disk of it can go.
    """

    visit: int
    outcome: Literal["finished", "cancelled", "refused"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VisitRestarted:
    """The visit begins anew, from the state before it, because changes were lost with a device."""

    visit: int


Answer = Action | tuple[Action, ...] | VisitEnded | VisitRestarted
