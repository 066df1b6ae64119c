"""Instructions are the state machine's answers to events; they are frozen and have a JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StateSource:
    """Names a state and where to fetch it: an agent's incarnation, or the store (``None``)."""

    state: int
    incarnation: str | None


@dataclass(frozen=True, slots=True)
class StartSubEpoch:
    """Train the trial over ``partitions`` from state ``source.state`` to ``state``.

    The source may still be ending its own sub-epoch; then the agent waits for its shards. On the
    first visit of an epoch ``metrics`` has what ``EndEpoch`` said of the epoch before; it is empty
    on all other visits and in epoch 0. A repeated visit has the same metrics again. After a
    ``TrainUncut`` the model is trained in one piece (``uncut``).

    A visit of several partitions is one attempt of as many agents, whose incarnations ``replicas``
    has in rank order; each is told by an instruction of its own, and trains over the partition at
    its place. They sum their gradients in rank order, and all of them make ``state``.
    """

    attempt: int
    trial: int
    state: int
    epoch: int
    partitions: tuple[int, ...]
    worker: int
    incarnation: str
    source: StateSource
    metrics: dict[str, float]
    uncut: bool = False
    replicas: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """Return the place of the agent among the replicas, 0 without any."""
        return self.replicas.index(self.incarnation) if self.replicas else 0

    @property
    def partition(self) -> int:
        """Return the partition that this agent trains over."""
        return self.partitions[self.rank]


@dataclass(frozen=True, slots=True)
class FetchShards:
    """Start to fetch the shards of this state now, because a task that needs them will follow."""

    trial: int
    worker: int
    incarnation: str
    source: StateSource


@dataclass(frozen=True, slots=True)
class AdoptPartitions:
    """Decode these partitions of a worker that did not come back; ``PartitionsAdopted`` answers."""

    worker: int
    incarnation: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Evaluate the immutable ``state`` on validation ``partitions``, one as yet."""

    attempt: int
    trial: int
    epoch: int
    state: int
    partitions: tuple[int, ...]
    worker: int
    incarnation: str
    source: StateSource
    uncut: bool = False

    @property
    def partition(self) -> int:
        """Return the one partition."""
        (partition,) = self.partitions
        return partition


@dataclass(frozen=True, slots=True)
class MergeMetrics:
    """Let the user's code merge an epoch's custom metrics after all its evaluations.

    ``states`` has what the metrics computed on each partition, in partition order. No other task
    has the number ``attempt``, so an answer that belongs to a void epoch is recognised.
    """

    attempt: int
    trial: int
    epoch: int
    states: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this attempt and withdraw what it published; no answer is expected."""

    attempt: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write ``state``, which this incarnation holds whole, to the store.

    The answer is ``Checkpointed`` or ``CheckpointFailed``.
    """

    trial: int
    state: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Collect:
    """Delete this state from the store, with these segments, which no other state there names."""

    trial: int
    state: int
    objects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForkState:
    """Name the parent's ``state``, which is in the store, as the trial's own.

    No byte is copied: both states name the same segments.
    """

    trial: int
    parent: int
    state: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget this state and end any fetch of it.

    Trainable segments that no other held state names are freed. Frozen segments stay while trials
    may share them, so that a frozen backbone is not sent twice.
    """

    trial: int
    state: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Count this sub-epoch provisionally: a ``Redo`` may still take it back.

    States are numbered by the partitions that a trial has been to, so one over several
    ``partitions`` makes ``state`` from the state of as many numbers before.
    """

    attempt: int
    trial: int
    state: int
    epoch: int
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Redo:
    """Treat these visits as void, because neither a live worker nor the store has their states.

    A visit of several partitions has as many numbers here, up to that of its state.
    """

    trial: int
    visits: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class TrainUncut:
    """Train the trial in one piece from its first state, because an audit found this difference.

    Its states keep their shards. A ``Redo`` takes back what was committed before.
    """

    trial: int
    difference: str


@dataclass(frozen=True, slots=True)
class CutFiner:
    """Cut the trial finer, and lay out these states of the store so, because it lacks memory.

    ``TrialRecut`` or ``RecutRefused`` answers. Until then it does not train. A fork whose cut is
    ``inherited``, because its parent was cut finer meanwhile, may still be cut finer itself.
    """

    trial: int
    states: tuple[int, ...]
    error: str
    inherited: bool = False


@dataclass(frozen=True, slots=True)
class ChangeCut:
    """Let the trial go on from ``state`` in the shards of a ``TrialRecut``, instead of so many."""

    trial: int
    state: int
    shards_before: int
    shards: int
    inherited: bool = False


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """End an epoch of the trial with "train_loss" and, if there is validation data, "val_*".

    ``last`` says that the trial ends with it by itself, because it does not improve any more.
    """

    trial: int
    epoch: int
    metrics: dict[str, float]
    last: bool = False


@dataclass(frozen=True, slots=True)
class FinishTrial:
    """End the trial as "finished", "failed" or "stopped", with the reason if there is one.

    Its result is in the store and is ``state``. If the trial keeps
    its best state and any epoch was finite, it is that one; otherwise it is the newest. A failed
    trial has no result, and its ``state`` is 0. A trial can end more than once, if its budget is
    extended after its end.
    """

    trial: int
    status: str
    reason: str
    state: int


@dataclass(frozen=True, slots=True)
class ExtensionFailed:
    """Tell why a trial, which had finished before, could not train up to the epoch ``budget``.

    A ``Redo`` before it takes back what came after the last epoch whose state is kept, and a
    ``FinishTrial`` follows with the result of the epochs that are left.
    """

    trial: int
    budget: int
    error: str


@dataclass(frozen=True, slots=True)
class ReopenTrial:
    """Let a finished trial go on, because its budget was extended; its result is void."""

    trial: int


@dataclass(frozen=True, slots=True)
class RestTrial:
    """The trial rests, because the run ends for now; ``state``, its result so far, is stored."""

    trial: int
    state: int


@dataclass(frozen=True, slots=True)
class FinishRun:
    """End the run, because every trial is over; it comes again if the search was reopened."""


Instruction = (
    StartSubEpoch
    | FetchShards
    | AdoptPartitions
    | Evaluate
    | MergeMetrics
    | Cancel
    | Checkpoint
    | Collect
    | ForkState
    | Drop
    | Commit
    | Redo
    | TrainUncut
    | CutFiner
    | ChangeCut
    | EndEpoch
    | FinishTrial
    | ExtensionFailed
    | ReopenTrial
    | RestTrial
    | FinishRun
)

Instructions = list[Instruction]
"""What a decision leads to, in the order in which it is carried out."""
