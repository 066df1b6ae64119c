"""Defines a run's JSON documents; the run folder keeps them, agents and replay read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

RUN_FILE = "run.json"
NUMERIC_FILE = "numeric.json"
"""What the bits of results depend on, as each worker found it."""
REFUSED_FILE = "refused.json"
"""The trials that could not be built: they are part of the result, never of the run."""

WORKERS_FILE = "workers.json"
"""Where the latest agent of each worker ran: host, process id, addresses of its GPUs."""


@dataclass(frozen=True)
class TrialSpec:
    """Describes one trial: all that an agent needs, with the user's code, which travels once.

    `seed` keys the trial's random numbers; `cut` and `template` are what admission found;
    `nbytes` is the size of its state; `steps` holds optimizer steps per partition.
    """

    trial: int
    trial_id: str
    params: Mapping[str, Any]
    seed: int
    cut: Mapping[str, Any]
    template: Mapping[str, Any]
    nbytes: int
    batch_size: int
    accumulate: int
    steps: tuple[int, ...]
    shards: tuple[tuple[str, str], ...]
    """The digests of state 0: (frozen, trainable) of every shard."""
    patience: int | None = None
    """Epochs in a row without a better state that end the trial early; None: it never ends so."""
    custom_metrics: tuple[str, ...] = ()
    """The names of the metrics that the user's code merges from partitions."""

    @property
    def steps_per_epoch(self) -> int:
        return sum(self.steps)

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> TrialSpec:
        shards = tuple((frozen, trainable) for frozen, trainable in doc["shards"])
        tuples = {name: tuple(doc[name]) for name in ("steps", "custom_metrics")}
        return cls(**{**doc, **tuples, "shards": shards})


@dataclass(frozen=True)
class RunDocument:
    """Describes one run of a search.

    `factory` is the `module:qualname` of `estimator_gen_fn`, None where a new process can't import
    it; `metrics` maps every measured name to its direction; `sample_weight_column` weighs rows;
    `store` and `fingerprint` find the data again; `threads` is the thread count of every agent, and
    `reader` names what reads the rows. A run that goes on with the trials of another one begins
    with their results as state 0. Its `first_epoch` says how many epochs they have had, because
    the order of rows depends on the number of the epoch. A trial fails whose batch takes longer
    than `batch_seconds`, or whose task takes longer than `sub_epoch_seconds`; None is no limit.
    """

    run_id: str
    factory: str | None
    seed: int
    order: str
    num_epochs: int
    num_partitions: int
    evaluation_metric: str
    metrics: Mapping[str, str]
    feature_columns: tuple[str, ...]
    label_columns: tuple[str, ...]
    store: Mapping[str, Any]
    fingerprint: str
    validated: bool
    threads: int
    trials: tuple[TrialSpec, ...]
    sample_weight_column: str | None = None
    reader: str = ""
    first_epoch: int = 0
    batch_seconds: float | None = None
    sub_epoch_seconds: float | None = None
    format: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> RunDocument:
        columns: dict[str, Sequence[str]] = {
            name: tuple(doc[name]) for name in ("feature_columns", "label_columns")
        }
        trials = tuple(TrialSpec.from_json(trial) for trial in doc["trials"])
        return cls(**{**doc, **columns, "trials": trials})
