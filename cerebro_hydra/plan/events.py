"""What the hopper tells the state machine: facts that happened, frozen and JSON-able.

Every event is idempotent: it names the attempt or the incarnation it speaks of, and is ignored
when that is over. Seconds are measured by the shell, because the core knows no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hop:
    """What it took to bring a trial's shards to its worker."""

    bytes_moved: int
    bytes_saved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """An agent is ready; an older incarnation in the same worker slot is thereby lost."""

    worker: int
    incarnation: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An agent ended or fell silent; what it held in memory is gone."""

    incarnation: str
    reason: str


@dataclass(frozen=True, slots=True)
class SubEpochEnding:
    """The last window of a sub-epoch starts: its shards are about to be published."""

    attempt: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class SubEpochDone:
    """A sub-epoch is trained and its shards are published whole.

    ``digests`` has one (frozen, trainable) pair per shard. ``seconds`` is the time from the
    first forward to the last update; the transfer before it is in ``hop``.
    """

    attempt: int
    incarnation: str
    rows: int
    loss_sum: float
    digests: tuple[tuple[str, str], ...]
    nbytes: int
    seconds: float
    hop: Hop


@dataclass(frozen=True, slots=True)
class StateReceived:
    """This agent now holds the trial's state after ``visit`` whole."""

    trial: int
    visit: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The user's code failed: the trial fails with this traceback."""

    attempt: int
    incarnation: str
    error: str


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Shards could not be fetched: not the trial's fault.

    An agent reports it after its own retries, which outlast the time in which a dead owner is
    noticed; otherwise one slow ``WorkerLost`` would use up the trial's chances.
    """

    attempt: int
    incarnation: str
    error: str


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """One validation partition is evaluated.

    ``sums`` has (sum, rows) for "loss" and for every metric that is a mean over rows; ``states``
    the JSON value that each custom metric made of the partition, by name.
    """

    attempt: int
    incarnation: str
    sums: dict[str, tuple[float, int]]
    seconds: float
    hop: Hop
    states: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MetricsMerged:
    """The custom metrics of an epoch, by name; answers the ``MergeMetrics`` of the same attempt."""

    attempt: int
    trial: int
    epoch: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class MetricsMergeFailed:
    """The user's code that merges custom metrics failed: the trial fails with this traceback."""

    attempt: int
    trial: int
    epoch: int
    error: str


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The trial's state after ``visit`` is whole in the store."""

    trial: int
    visit: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class TrialStopped:
    """The search (or the user) gives this trial up before its last epoch."""

    trial: int
    reason: str


Event = (
    WorkerJoined
    | WorkerLost
    | SubEpochEnding
    | SubEpochDone
    | StateReceived
    | TaskFailed
    | TransferFailed
    | EvaluationDone
    | MetricsMerged
    | MetricsMergeFailed
    | Checkpointed
    | TrialStopped
)
