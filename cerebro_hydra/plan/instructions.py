"""What the state machine tells the shell to do, frozen and JSON-able."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StateSource:
    """Where a state can be fetched: an agent's incarnation, or the store (``None``)."""

    visit: int
    incarnation: str | None


@dataclass(frozen=True, slots=True)
class StartSubEpoch:
    """Train the trial over one partition, from state ``source.visit`` to state ``visit``.

    The source may still be ending its own sub-epoch: the agent then waits for the shards there.
    ``metrics`` is what ``EndEpoch`` said of the epoch before, on the first visit of an epoch;
    empty on all others and in epoch 0. A repeated visit is given the same again.
    """

    attempt: int
    trial: int
    visit: int
    epoch: int
    partition: int
    worker: int
    incarnation: str
    source: StateSource
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class FetchShards:
    """A reservation: start waiting for the shards of that state now, the task follows."""

    trial: int
    worker: int
    incarnation: str
    source: StateSource


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the immutable state after ``visit`` on one validation partition."""

    attempt: int
    trial: int
    epoch: int
    visit: int
    partition: int
    worker: int
    incarnation: str
    source: StateSource


@dataclass(frozen=True, slots=True)
class MergeMetrics:
    """Let the user's code merge an epoch's custom metrics: it is evaluated on every partition.

    ``states`` has what the metrics made of each partition, in partition order. ``attempt`` is a
    number that no other task has, so that the answer to a void epoch is not taken for this one's.
    """

    attempt: int
    trial: int
    epoch: int
    states: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this attempt and withdraw whatever it published; nothing more is expected of it."""

    attempt: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write the state after ``visit`` to the store; this incarnation holds it whole."""

    trial: int
    visit: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget this state and end a fetch of it.

    Trainable segments that no other held state names go; frozen segments stay for the run, so
    that a frozen backbone is never sent twice.
    """

    trial: int
    visit: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Commit:
    """This sub-epoch counts, provisionally: a ``Redo`` may still take it back."""

    attempt: int
    trial: int
    visit: int
    epoch: int
    partition: int


@dataclass(frozen=True, slots=True)
class Redo:
    """These visits are void, because no live worker nor the store holds their states."""

    trial: int
    visits: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """The trial ended an epoch: "train_loss" and, with validation data, "val_*"."""

    trial: int
    epoch: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class FinishTrial:
    """The trial is over: "finished", "failed" or "stopped", with the reason if there is one.

    Its result, which is in the store, is the state after ``visit``: the best one of a trial with
    patience, if an epoch was finite, else the newest. A failed trial has none: ``visit`` is 0.
    """

    trial: int
    status: str
    reason: str
    visit: int


@dataclass(frozen=True, slots=True)
class FinishRun:
    """Every trial is over; comes once."""


Instruction = (
    StartSubEpoch
    | FetchShards
    | Evaluate
    | MergeMetrics
    | Cancel
    | Checkpoint
    | Drop
    | Commit
    | Redo
    | EndEpoch
    | FinishTrial
    | FinishRun
)
