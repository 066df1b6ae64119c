"""Events tell the state machine what happened; they are frozen and have a JSON form.

Every event is idempotent: it names its attempt or incarnation and is ignored once that is over.
Seconds are measured outside of the state machine, which has no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cerebro_hydra.plan.messages.config import TrialConfig
from cerebro_hydra.plan.messages.device_work import DeviceWork


@dataclass(frozen=True, slots=True)
class RecutState:
    """Holds a state in the shards of a finer cut, whose segments are in the store.

    ``digests`` has one (frozen, trainable) pair per shard, and all shards have the same ``cursor``,
    which is None for state 0.
    """

    state: int
    digests: tuple[tuple[str, str], ...]
    cursor: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TrialRecut:
    """A trial was admitted again with a finer cut, in which these states are laid out.

    ``document`` describes the trial from now on. Nothing of it is written before this is decided.
    """

    config: TrialConfig
    states: tuple[RecutState, ...]
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecutRefused:
    """A trial can't be cut finer, so it fails with this reason."""

    trial: int
    error: str


@dataclass(frozen=True, slots=True)
class Hop:
    """Tells what it cost to bring a trial's shards to its worker."""

    bytes_moved: int
    bytes_saved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """An agent is ready, so an older incarnation in the same worker slot is lost.

    It can hold ``residents`` tasks at once, which share its ``devices``.
    """

    worker: int
    incarnation: str
    partitions: tuple[int, ...]
    devices: int = 1
    residents: int = 1


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An agent ended or stopped answering, so what it held in memory is gone.

    ``attempt`` is the task that it had begun last by its own word, so that a trial which kills
    agents is known by it. An agent that is told to start a task may still be in the one before. Of
    several residents it names the one whose tasks it computed last.
    """

    incarnation: str
    reason: str
    host: str = ""
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerGivenUp:
    """A worker did not come, or come back, in time, so others take over its partitions."""

    worker: int
    partitions: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PartitionsAdopted:
    """An agent can now serve these partitions of other workers, too."""

    incarnation: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SubEpochEnding:
    """The last window of a sub-epoch starts, so its shards will soon be published."""

    attempt: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class SubEpochDone:
    """A sub-epoch is trained and all its shards are published.

    ``digests`` has one (frozen, trainable) pair per shard. ``seconds`` is the time from the first
    forward to the last update; ``hop`` has the transfer before it. Of these seconds an audit, which
    found no difference, took ``audit_seconds``; 0 if there was none. Beside other residents,
    devices computed for it ``device_seconds`` long; None means all the time. With replicas each
    rank tells of its own rows and loss, and of the digests of the one state that all of them made.
    """

    attempt: int
    incarnation: str
    rows: int
    loss_sum: float
    digests: tuple[tuple[str, str], ...]
    nbytes: int
    seconds: float
    hop: Hop
    audit_seconds: float = 0.0
    device_seconds: float | None = None

    @property
    def work_seconds(self) -> float:
        """Return how long it would have taken alone."""
        return self.seconds if self.device_seconds is None else self.device_seconds


@dataclass(frozen=True, slots=True)
class DevicesWorked:
    """A worker with shard queues tells what its devices did in the ``seconds`` since it last told.

    It tells when a sub-epoch or an evaluation is done; nothing is decided by it.
    """

    incarnation: str
    seconds: float
    devices: tuple[DeviceWork, ...]


@dataclass(frozen=True, slots=True)
class StateReceived:
    """The agent now holds every shard of the trial's ``state``."""

    trial: int
    state: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The user's code failed, so the trial fails with this traceback.

    If it lacked ``memory`` that a finer cut saves, it may be cut finer instead.
    """

    attempt: int
    incarnation: str
    error: str
    memory: bool = False


@dataclass(frozen=True, slots=True)
class AuditFailed:
    """A step of this sub-epoch differs from the same step of the uncut model."""

    attempt: int
    incarnation: str
    difference: str


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Shards could not be fetched, which is not the trial's fault.

    An agent reports it after its own retries, which last longer than it takes to notice a dead
    owner. Otherwise one slow ``WorkerLost`` would use up the trial's chances. Where the source has
    been found to have ``altered`` bytes, others than were announced, it is no source any more.
    """

    attempt: int
    incarnation: str
    error: str
    altered: bool = False


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """One validation partition is evaluated.

    ``sums`` has (sum, rows) for "loss" and for every metric that is a mean over rows. ``states``
    has the JSON value that each custom metric computed on the partition, by name. Beside other
    residents, devices computed for it ``device_seconds`` long; None means all the time.
    """

    attempt: int
    incarnation: str
    sums: dict[str, tuple[float, int]]
    seconds: float
    hop: Hop
    states: dict[str, Any]
    device_seconds: float | None = None

    @property
    def work_seconds(self) -> float:
        """Return how long it would have taken alone."""
        return self.seconds if self.device_seconds is None else self.device_seconds


@dataclass(frozen=True, slots=True)
class MetricsMerged:
    """The custom metrics of an epoch are merged; ``values`` has them by name.

    It answers the ``MergeMetrics`` with the same ``attempt``.
    """

    attempt: int
    trial: int
    epoch: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class MetricsMergeFailed:
    """The user's code that merges custom metrics failed, so the trial fails with this traceback."""

    attempt: int
    trial: int
    epoch: int
    error: str


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """Every shard of the trial's ``state`` is in the store."""

    trial: int
    state: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """``state`` could not be written to the store, in spite of several tries.

    Where its bytes were ``altered`` after they were published, the agent holds it no more.
    """

    trial: int
    state: int
    incarnation: str
    error: str
    altered: bool = False


@dataclass(frozen=True, slots=True)
class ForkFailed:
    """The state of a fork could not be named in the store, so the fork fails."""

    trial: int
    error: str


@dataclass(frozen=True, slots=True)
class StateDiffers:
    """A state that was made again after a resume has other bytes than before, in these shards."""

    trial: int
    state: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunResumed:
    """The run goes on in a new process: every agent is lost, and all that was under way.

    ``missing`` has (trial, state) of what the store does not hold any more, as it had by the
    journal. No first state of a trial is among them. A finished trial with one that is to train
    further makes it again.
    """

    missing: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RunSuspended:
    """The run ends for now, for this reason: every trial rests until ``RunResumed``."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrialProposed:
    """The search proposes a candidate, which may train up to the epoch ``budget``.

    Candidates are numbered in the order in which they are proposed. ``TrialAdded``, or
    ``TrialForked`` for one that has a ``parent``, follows when it is admitted, and
    ``TrialRefused`` if it can't be built. Either may come after ``SearchClosed``.
    """

    trial: int
    params: dict[str, Any]
    budget: int
    parent: int | None = None
    state: int = 0  # the parent's state that it goes on from


@dataclass(frozen=True, slots=True)
class TrialRefused:
    """A candidate can't be built, so it ends as failed with this traceback, and moves nobody."""

    trial: int
    error: str


@dataclass(frozen=True, slots=True)
class TrialAdded:
    """A trial can begin, and may train up to the epoch ``budget``."""

    config: TrialConfig
    budget: int


@dataclass(frozen=True, slots=True)
class TrialForked:
    """A trial can go on from another one's ``state``.

    It inherits the visits and epochs up to there, and the state itself; its own ``config`` says
    how it goes on. It may train up to the epoch ``budget``, inherited epochs included.
    """

    config: TrialConfig
    parent: int
    state: int
    budget: int


@dataclass(frozen=True, slots=True)
class BudgetExtended:
    """The search lets a trial train up to the epoch ``budget``, if that is later than before."""

    trial: int
    budget: int


@dataclass(frozen=True, slots=True)
class TrialPaused:
    """The search lets a trial rest: its state goes to the store and leaves the workers' memory.

    ``rung`` is the number of epochs after which it is compared with others, and rests for that;
    None if it rests for another reason.
    """

    trial: int
    rung: int | None = None


@dataclass(frozen=True, slots=True)
class TrialResumed:
    """The search lets a paused trial go on."""

    trial: int


@dataclass(frozen=True, slots=True)
class TrialStopped:
    """The search or the user gives this trial up before its last epoch."""

    trial: int
    reason: str


@dataclass(frozen=True, slots=True)
class SearchClosed:
    """The search proposes nothing more: trials end with their budgets, and then the run does.

    Args:
        num_epochs: how far its trials might train; more epochs extend the run. None if that is not
            known.
    """

    num_epochs: int | None = None


@dataclass(frozen=True, slots=True)
class SearchReopened:
    """The search proposes more after it was closed; a larger budget lets finished trials go on.

    One that fails then ``keeps_results``: it ends as ``ExtensionFailed`` says. In the journals of
    earlier versions it lost them.
    """

    keeps_results: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """Gives the trial's open task on a partition to the worker that holds the partition.

    ``others`` has the further partitions of a sub-epoch with replicas, in rank order, each to be
    trained by the worker that holds it.
    """

    trial: int
    partition: int
    worker: int
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Assigned:
    """These tasks were chosen to be begun, or to be reserved behind a task that is ending."""

    tasks: tuple[Assignment, ...]


SearchEvent = (
    TrialProposed
    | TrialRefused
    | TrialAdded
    | TrialForked
    | BudgetExtended
    | TrialPaused
    | TrialResumed
    | TrialStopped
    | SearchClosed
    | SearchReopened
)

AttemptEvent = (
    SubEpochEnding | SubEpochDone | TaskFailed | AuditFailed | TransferFailed | EvaluationDone
)

Event = (
    AttemptEvent
    | WorkerJoined
    | WorkerLost
    | WorkerGivenUp
    | PartitionsAdopted
    | DevicesWorked
    | StateReceived
    | MetricsMerged
    | MetricsMergeFailed
    | Checkpointed
    | CheckpointFailed
    | ForkFailed
    | StateDiffers
    | TrialRecut
    | RecutRefused
    | RunResumed
    | RunSuspended
    | SearchEvent
    | Assigned
)
