"""Defines a run's JSON documents; the run folder keeps them, agents and replay read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypedDict

from cerebro_hydra.documents import (
    Count,
    Positive,
    decode,
    one_of,
    unreadable,
    within,
)
from cerebro_hydra.errors import StoreError
from cerebro_hydra.kernels import KERNELS
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.schedules.registry import FLUSHED, SCHEDULES
from cerebro_hydra.plan.schedules.trial_plan import TrialPlan
from cerebro_hydra.storage.names import Digest, Name, trial_name
from cerebro_hydra.storage.trial_code import TrialCode

FORMAT = 4
"""The version of the layout of `run.json`."""

MOST_THREADS = 4096

RUN_FILE = "run.json"
TRIAL_FILE = "trial.json"
"""What a trial is; it is written last of all that a trial begins with."""
NUMERIC_FILE = "numeric.json"
"""What the bits of results depend on, as each worker found it."""
SEARCH_FILE = "search.json"
"""What the search was begun with that its arguments may not have again, such as a study."""
PLAN_FILE = "plan.json"
"""What was expected of the run where its trials train by a plan."""
WORKERS_FILE = "workers.json"
"""Where the latest agent of each worker ran: host, process id, addresses of its GPUs."""


def _trainable_schedule(value: str, where: str) -> None:
    """Refuse a schedule that only another version has; a copy of the file would have it too."""
    if value in SCHEDULES:
        return
    pick = f" and with pick={value!r} of the backend" if value in PICKS else ""
    raise StoreError(
        f"{where} is {value!r}, which this version of cerebro_hydra can't train; open the run with "
        f"the version that wrote it, or train its trials in a new run, without schedule{pick}"
    )


def _plan_of_equal_bits(value: TrialPlan | None, where: str) -> None:
    """Refuse a plan by which a trial would read older weights, or have no device."""
    if value is not None and (value.schedule not in FLUSHED or value.devices < 1):
        raise unreadable(where, value)


@dataclass(frozen=True)
class TrialSpec:
    """Describes one trial: all that an agent needs, with the user's code, which travels once.

    `seed` keys the trial's random numbers; `cut` and `template` are what admission found;
    `nbytes` is the size of its state; `steps` holds optimizer steps per partition; `parameters`
    counts the model's elements, frozen ones too; `recompute` says whether
    activations are computed again in backward, None leaves it to the worker; `tasks` is what the
    tasks of its shards were measured to need of a device, None where no queues were asked for;
    `sizes` is what else its profile says, by which it can be planned. A
    trial that may be cut `finer` is, once, when it runs out of memory; its document changes then.
    `attributes` marks what else its first steps changed, which may change later, too;
    `set_in_evaluation` is what its first evaluations changed, and what of training they leave
    unread. `staleness` says, by shard, how many
    updates older the weights are that its tasks read, where its schedule lets them. `stages` is how
    many shards each stage of its pipeline has; it is empty where `tasks` and the devices decide, as
    that changes no result. `plan` is what `plan="auto"` chose in place of `schedule` and
    `recompute`. `optimizer_on` says whose kernels update the parameters, on which bits depend where
    the device is a GPU.
    """

    trial: Count
    trial_id: Name
    params: Mapping[str, Any]
    seed: int
    cut: Mapping[str, Any]
    template: Mapping[str, Any]
    nbytes: Count
    batch_size: Positive
    accumulate: Positive
    steps: tuple[Count, ...]
    shards: tuple[tuple[Digest, Digest], ...]
    """The digests of state 0: (frozen, trainable) of every shard.

    A fork has its parent's, until it is cut finer; then it has those of the state it began with.
    """
    patience: Positive | None = None
    """Epochs in a row without a better state that end the trial early; None: it never ends so."""
    keep: Annotated[str, one_of("best", "last")] = "last"
    """Whether its result is the state after its best epoch, or after its last."""
    custom_metrics: tuple[str, ...] = ()
    """The names of the metrics that the user's code merges from partitions."""
    parameters: Count = 0
    schedule: Annotated[str, _trainable_schedule] = "sequential"
    recompute: bool | None = None
    optimizer_on: Annotated[str, one_of("device", "host")] = "device"
    tasks: Mapping[str, Any] | None = None
    finer: bool = False
    attributes: tuple[str, ...] = ()
    set_in_evaluation: tuple[str, ...] = ()
    staleness: tuple[Count, ...] = ()
    stages: tuple[Positive, ...] = ()
    sizes: Mapping[str, Any] | None = None
    plan: Annotated[TrialPlan | None, _plan_of_equal_bits] = None
    replicas: Positive = 1
    tail: bool = False
    compiles: bool = False
    """Whether blocks of its model run as torch.compile makes them, for which workers need g++."""
    code: TrialCode | None = None
    """What its code was when it was admitted, in digests; None in runs of earlier versions."""

    @property
    def asked_replicas(self) -> int | str:
        """Return what the user has given as the trial's replicas."""
        return "tail" if self.tail else self.replicas

    @property
    def steps_per_epoch(self) -> int:
        return steps_of_epoch(self.steps, self.replicas)

    def lags(self, shards: Mapping[str, int]) -> dict[str, int]:
        """Return by parameter how many updates older the weights are that the trial reads.

        Args:
            shards: by parameter that trains, its shard.
        """
        return {n: self.staleness[k] for n, k in shards.items()} if self.staleness else {}

    def to_json(self) -> dict[str, Any]:
        """Describe the trial in JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, doc: Any, where: str) -> TrialSpec:
        """Rebuild the spec from `to_json`.

        Raises:
            StoreError: a field is missing, unknown or of a wrong type, or the id is not that of
                the number; the message begins with `where`.
        """
        spec: TrialSpec = decode(cls, doc, where)
        if spec.trial_id != trial_name(spec.trial):
            raise unreadable(f"{where}.trial_id", spec.trial_id)
        return spec


def steps_of_epoch(steps: Sequence[int], replicas: int | str) -> int:
    """Return how many optimizer steps an epoch has.

    Replicas take the steps of a group of partitions together, until the longest of them is over.

    Args:
        steps: those that each partition has alone.
        replicas: how many, or "tail", which has none before its tail.
    """
    several = replicas if isinstance(replicas, int) else 1
    groups = range(0, len(steps), several)
    return sum(max(steps[first : first + several]) for first in groups)


@dataclass(frozen=True)
class HeldOut:
    """Says which rows of a DataFrame a search held out: a share of them, those of a column, none.

    With the run's seed, it gives the same rows the fingerprint of the run's data again.
    """

    share: float | None = None
    column: str | None = None

    @classmethod
    def of(cls, validation: float | str | None) -> HeldOut:
        """Take the `validation` of a search."""
        return cls(column=validation) if isinstance(validation, str) else cls(validation)

    @property
    def validation(self) -> float | str | None:
        """Return what the search was given."""
        return self.share if self.column is None else self.column


@dataclass(frozen=True)
class RunDocument:
    """Describes what all trials of a run have in common; each has a document of its own.

    `factory` is the `module:qualname` of `estimator_gen_fn`, None where a new process can't import
    it; `metrics` maps every measured name to its direction; `sample_weight_column` weighs rows;
    `store` and `fingerprint` find the data again; `threads` is the thread count of every agent, and
    `reader` names what reads the rows. A trial fails whose batch takes longer than
    `batch_seconds`, or whose task takes longer than `sub_epoch_seconds`; None is no limit.
    Audits may take `audit_share` of an agent's training time. `checkpoint` says after what the
    newest state of a trial is written to the store. `keep` and `admission_seconds` hold for
    candidates that are still to be admitted. `device` says on what trials are trained, and
    `numerics` how its CPU libraries choose kernels, for bits depend on both. `held_out` is None
    where the data was prepared before the search, perhaps with another seed. `search` is the digest
    of `search.json`, None where the run has none, or an earlier version began it. `archives` names
    the trials whose models lie in `models/`, each since its archive was whole there.
    """

    run_id: Name
    factory: str | None
    seed: int
    order: Annotated[str, one_of("dynamic", "seeded")]
    num_epochs: Positive
    num_partitions: Positive
    evaluation_metric: str
    metrics: Mapping[str, Annotated[str, one_of("min", "max")]]
    feature_columns: tuple[str, ...]
    label_columns: tuple[str, ...]
    store: Mapping[str, str]
    fingerprint: Digest
    validated: bool
    threads: Annotated[int, within(1, MOST_THREADS)]
    sample_weight_column: str | None = None
    reader: str = ""
    batch_seconds: float | None = None
    sub_epoch_seconds: float | None = None
    audit_share: Annotated[float, within(0, 1)] = 0.0
    checkpoint: Annotated[str, one_of("epoch", "sub-epoch", "end")] = "epoch"
    keep: Annotated[str | None, one_of("best", "last", None)] = None
    admission_seconds: float | None = None
    device: Annotated[str, one_of("cpu", "cuda")] = "cpu"
    numerics: Annotated[str, one_of(*KERNELS)] = "fast"
    held_out: HeldOut | None = None
    search: Digest | None = None
    archives: tuple[Name, ...] = ()
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Describe the run in JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, doc: Any, where: str = RUN_FILE) -> RunDocument:
        """Rebuild the document from `to_json`.

        Raises:
            StoreError: it has another format, a field is missing, unknown or of a wrong type, or
                fields contradict each other; the message begins with `where`.
        """
        found = doc.get("format") if isinstance(doc, dict) else None
        if type(found) is int and found != FORMAT:
            raise StoreError(
                f"{where} has format {found}, and this version of cerebro_hydra reads format "
                f"{FORMAT}; open the run with the version that wrote it"
            )
        document: RunDocument = decode(cls, doc, where)
        if not document.feature_columns:
            raise unreadable(f"{where}.feature_columns", document.feature_columns)
        if document.evaluation_metric not in document.metrics:
            raise unreadable(f"{where}.evaluation_metric", document.evaluation_metric)
        return document


class ScalerState(TypedDict):
    """Has what torch's GradScaler says of itself, and the number of steps that were skipped."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: Count
    _growth_tracker: Count
    skipped: Count


class Cursor(TypedDict, total=False):
    """Has what a shard needs beside its tensors; it is empty before the first step.

    Where a trial forks another one, there are the step, the epochs that began after the first, and
    the scaler.
    """

    step: Count
    epochs: Count
    groups: list[dict[str, Any]]
    scheduler: Any
    scaler: ScalerState


class ShardEntry(TypedDict):
    """Names the two segments of one shard of a state."""

    frozen: Digest
    trainable: Digest
    cursor: Cursor | None


class TrialDocument(TypedDict):
    """Describes a trial of a run."""

    run_id: Name
    spec: dict[str, Any]


class StateDocument(TypedDict):
    """Describes a state of a trial, by the digests of its segments."""

    run_id: Name
    trial: Count
    state: Count
    shards: list[ShardEntry]
