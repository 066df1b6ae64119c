"""Says where a trial stands and what the search wants of it: one value each, and one table.

::

    AWAITING ──► WAITING ◄──► TRAINING, EVALUATING or MERGING
                 │ ▲ ▲ ▲
                 │ │ │ └────► RESTARTING   after a failed audit, to be trained uncut
                 │ │ └─────── RECUTTING ◄──► LACKING   memory, to be cut finer
                 │ │                           ▲ │
                 ├─┼───────────────────────────┘ │
                 ▼ │                             ▼
              FINISHED, STOPPED or FAILED ◄──────┘

A stage says where a trial stands, with what only belongs to that. A goal says how far the search
lets it go. The two are apart, because a search may pause or stop a trial at any stage of its life.
Epochs that are lost and of which the search was told are made again, whatever the goal is; a trial
is at its goal only then (``at_goal`` in ``plan/hop/trials.py``). Whether a trial is at its end is
neither: that follows from its history and from whether the search is closed (``outcome`` there).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import ClassVar


class TrialStatus(StrEnum):
    """Names the stages of a trial."""

    AWAITING = "awaiting"  # a fork: the state that it begins with is not in the store yet
    WAITING = "waiting"  # it has no task
    TRAINING = "training"
    EVALUATING = "evaluating"
    MERGING = "merging"  # the user's code merges the custom metrics of an epoch
    RESTARTING = "restarting"  # it goes back to its first state once no checkpoint is under way
    LACKING = "lacking"  # memory; it is cut finer once its states are in the store
    RECUTTING = "recutting"  # a ``CutFiner`` has no answer yet
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


OVER = (TrialStatus.FINISHED, TrialStatus.STOPPED, TrialStatus.FAILED)
IN_TRAINING = (
    TrialStatus.WAITING,
    TrialStatus.TRAINING,
    TrialStatus.EVALUATING,
    TrialStatus.MERGING,
)
"""Where a trial stands that may be given tasks, now or when it has done what it does."""
AWAY = tuple(status for status in TrialStatus if status not in (*IN_TRAINING, *OVER))
"""Where a trial stands that can be given none, and will be back."""


@dataclass(frozen=True, slots=True)
class PlainStage:
    """Is a stage to which nothing else belongs."""

    status: TrialStatus


WAITING = PlainStage(TrialStatus.WAITING)
TRAINING = PlainStage(TrialStatus.TRAINING)
EVALUATING = PlainStage(TrialStatus.EVALUATING)
RESTARTING = PlainStage(TrialStatus.RESTARTING)


@dataclass(frozen=True, slots=True)
class AwaitingParent:
    """A fork waits until the state of its parent that it goes on from is in the store."""

    parent: int
    status: ClassVar[TrialStatus] = TrialStatus.AWAITING


@dataclass(frozen=True, slots=True)
class MergingMetrics:
    """The ``MergeMetrics`` with the number ``attempt`` has no answer yet."""

    attempt: int
    status: ClassVar[TrialStatus] = TrialStatus.MERGING


@dataclass(frozen=True, slots=True)
class LackingMemory:
    """A trial is to be cut finer, because of this ``error``.

    A fork whose cut is ``inherited`` is only laid out like its parent, which was cut finer.
    """

    error: str
    inherited: bool = False
    status: ClassVar[TrialStatus] = TrialStatus.LACKING


@dataclass(frozen=True, slots=True)
class Recutting:
    """These ``states`` are laid out in a finer cut."""

    lack: LackingMemory
    states: tuple[int, ...]
    status: ClassVar[TrialStatus] = TrialStatus.RECUTTING


@dataclass(frozen=True, slots=True)
class Ended:
    """A trial is over; state ``result`` is its result.

    If it goes on after its end, it does so at the stage ``before``.
    """

    status: TrialStatus
    result: int
    before: Stage = WAITING


Stage = PlainStage | AwaitingParent | MergingMetrics | LackingMemory | Recutting | Ended

_NEXT_STATUS: dict[TrialStatus, tuple[TrialStatus, ...]] = {
    TrialStatus.AWAITING: (TrialStatus.WAITING,),
    TrialStatus.WAITING: (
        TrialStatus.TRAINING,
        TrialStatus.EVALUATING,
        TrialStatus.MERGING,
        TrialStatus.RESTARTING,
        TrialStatus.LACKING,
        *OVER,
    ),
    TrialStatus.TRAINING: (TrialStatus.WAITING,),
    TrialStatus.EVALUATING: (TrialStatus.WAITING,),
    TrialStatus.MERGING: (TrialStatus.WAITING,),
    TrialStatus.RESTARTING: (TrialStatus.WAITING, TrialStatus.FAILED),
    TrialStatus.LACKING: (TrialStatus.RECUTTING, *OVER),
    TrialStatus.RECUTTING: (TrialStatus.LACKING, TrialStatus.WAITING),
    TrialStatus.FINISHED: (TrialStatus.WAITING, TrialStatus.LACKING),
    TrialStatus.STOPPED: (),
    TrialStatus.FAILED: (TrialStatus.WAITING, TrialStatus.LACKING, TrialStatus.RESTARTING),
}
"""The statuses that may follow each."""


class GoalKind(Enum):
    """Names what a search wants of a trial."""

    TRAIN = "train"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class PlainGoal:
    """Is a goal to which nothing else belongs."""

    kind: GoalKind


TRAIN = PlainGoal(GoalKind.TRAIN)  # while it has budget
PAUSE = PlainGoal(GoalKind.PAUSE)


@dataclass(frozen=True, slots=True)
class StopGoal:
    """The trial ends as soon as its result is in the store, with this ``reason``."""

    reason: str
    kind: ClassVar[GoalKind] = GoalKind.STOP


Goal = PlainGoal | StopGoal

_NEXT_GOAL: dict[GoalKind, tuple[GoalKind, ...]] = {
    GoalKind.TRAIN: (GoalKind.PAUSE, GoalKind.STOP),
    GoalKind.PAUSE: (GoalKind.TRAIN, GoalKind.STOP),
    GoalKind.STOP: (),
}
"""The goals that may follow each."""


def check_stage(before: Stage, after: Stage) -> None:
    """Raise ValueError if a trial may not go from one stage to the other."""
    if after.status not in _NEXT_STATUS[before.status]:
        raise ValueError(f"a trial that is {before.status} can't become {after.status}")


def check_goal(before: Goal, after: Goal) -> None:
    """Raise ValueError if a search may not want the one after the other."""
    if after.kind not in _NEXT_GOAL[before.kind]:
        raise ValueError(f"a trial that is to {before.kind.value} is not to {after.kind.value}")
