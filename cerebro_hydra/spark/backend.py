"""Runs a search on an existing Spark, which is checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.backend import Factory
from cerebro_hydra.hopper.protocol.agent_spec import LossLimits
from cerebro_hydra.hopper.protocol.resources import MachineFacts, WorkerResources, machine_facts
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK
from cerebro_hydra.spark import preflight
from cerebro_hydra.spark.checks import gpus_per_task
from cerebro_hydra.spark.findings import raise_findings
from cerebro_hydra.spark.gpus import check_gpu_facts, gpu_facts
from cerebro_hydra.spark.java import explained_java
from cerebro_hydra.spark.launcher import SparkLauncher, no_progress_line, pickle_factory
from cerebro_hydra.spark.places import spark_folder
from cerebro_hydra.spark.session import context_of, workers_of
from cerebro_hydra.storage import Store, require_store
from cerebro_hydra.waits import Waiting, to_nobody, to_stderr
from cerebro_hydra.wire.credentials import TLS, new_credentials
from cerebro_hydra.worker_imports import by_own_workers

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from cerebro_hydra.data.manifest import Manifest, RowsFound
    from cerebro_hydra.data.partition import CachedPartition
    from cerebro_hydra.data.preparation.existing import ParquetMetadata

_T = TypeVar("_T")
_R = TypeVar("_R")
_TASKS_PER_WORKER = 4  # so that files of several sizes keep all of them busy


class SparkBackend:
    """Prepares data and starts agents on a Spark.

    Args:
        spark_context: a SparkContext or SparkSession; None takes the active one.
        num_workers: agents, and partitions of the data. None takes what `local_spark` was asked
            for, else every task slot.
        verbose: 0 is silent, 1 shows progress and says on standard error what is waited for.
        tls: True encrypts what driver and agents send each other, with a certificate made for each
            run; a `TLS` names the files of one to use instead. docs/cluster.md says more.
        join_timeout: seconds that a worker may be missing, at the start or after a loss, before the
            others take over its partitions; if no other is there, the run ends. None takes what
            Spark needs to replace an executor that fell silent: twice `spark.network.timeout` and
            a minute, so 300 by default.
        heartbeat_interval: seconds between two heartbeats of an agent and the driver.
        missed_heartbeats: how many in a row may be missed; then the agent is given up, its work is
            done again, and Spark starts another.
        max_failures: how many agents of one worker may be lost in a row of which none began a task;
            then that worker gets no more, and the others take over. Losses with work between them
            don't add up, and Spark's own `spark.task.maxFailures` ends no run.
        devices_per_worker: devices on which an agent runs shards at the same time: GPUs, each in a
            process of its own, where Spark gives its task as many; else CPU devices, in processes
            if there are several. None is one CPU device.
        device_memory: bytes of each device for shards, or a size such as "2GiB"; None is all that
            a CPU device needs, and what a GPU has but for a tenth, at least 1 GiB, which is left
            for kernels.
        host_memory: bytes of DRAM for the shards of an agent, or a size; None is half of what its
            machine or cgroup has, shared with the other agents there.
        scratch: a folder on a local disk of every worker for what DRAM can't hold; None takes
            Spark's local folder.
        residents: sub-epochs that an agent holds at once, or "auto".
        numerics: "fast" lets CPU libraries take the best kernels of each worker's CPU, so that bits
            are those of that kind of CPU. "portable" takes kernels that don't look at the CPU, for
            clusters of unlike machines; benchmarks/numerics has the price, docs/operations.md what
            is promised.
        pick: how a free device chooses among the trials that its worker holds: "oldest_first"
            takes the one that came first, "sharp" the one with the most work left. It changes no
            bit; benchmarks/sharp has the figures.
        threads_per_worker: threads that each device of an agent computes with. Another number gives
            other bits, so a run keeps its own. Let Spark's `spark.task.cpus` be what the devices of
            an agent need together.
        plan: "auto" lets a search choose how its trials train on these devices, among cuts,
            synchronous schedules and recomputation, which change no bit; None leaves all of that
            to each SparkEstimator (docs/planning.md).

    While other jobs hold the task slots that agents need, or a cluster still starts executors, the
    constructor waits. It runs one small job, and leaves the network to `cerebro_hydra.doctor`.

    Raises:
        ConfigurationError: an argument can't be used.
        SetupError: this Spark can't run agents; lists every setting, version or executor that is
            in the way, with its remedy.
    """

    def __init__(
        self,
        spark_context: SparkContext | SparkSession | None = None,
        num_workers: int | None = None,
        verbose: int = 1,
        tls: bool | TLS = False,
        join_timeout: float | None = None,
        heartbeat_interval: float = 0.5,
        missed_heartbeats: int = 20,
        max_failures: int = 8,
        devices_per_worker: int | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        scratch: str | None = None,
        residents: int | str = "auto",
        numerics: str = "fast",
        pick: str = DEFAULT_PICK,
        threads_per_worker: int = 1,
        plan: str | None = None,
    ) -> None:
        self.spark_context = context_of(spark_context)
        gpus = gpus_per_task(dict(self.spark_context.getConf().getAll()))
        self.resources = WorkerResources.checked(
            devices_per_worker, device_memory, host_memory, scratch, residents, gpus, numerics,
            pick, threads_per_worker, plan,
        )  # fmt: skip
        if not isinstance(verbose, int):
            raise ConfigurationError(f"verbose is {verbose!r}; it is 0 or 1")
        self.verbose = verbose
        new_credentials(tls)  # what can't be used is refused here, not when a run starts
        self.tls = tls
        if join_timeout is None:
            join_timeout = _replacement_seconds(self.spark_context)
        self.limits = LossLimits(join_timeout, heartbeat_interval, missed_heartbeats, max_failures)
        self.num_workers = workers_of(self.spark_context, num_workers)
        self._report = to_stderr if verbose else to_nobody
        with (
            explained_java(self.spark_context, "looking at Spark"),
            no_progress_line(self.spark_context),  # our lines say what is waited for
        ):
            preflight.require_ready(
                self.spark_context, self.num_workers, self._report, devices_per_worker, numerics
            )
            self.resources = self.resources.measured(
                lambda: self._mapped(partial(_machine_facts, scratch), range(self.num_workers)),
                lambda: self._gpu_memory(min(1.0, gpus)),
            )

    def prepare_data(
        self,
        store: Store,
        df: Any,
        validation: float | str | None = None,
        feature_columns: Sequence[str] = ("features",),
        label_columns: Sequence[str] | None = ("label",),
        seed: int = 0,
        recheck: bool = False,
    ) -> Manifest:
        """Write a DataFrame as one folder per partition and split, or find it prepared already.

        Args:
            store: where to.
            df: the rows; for trying things, also a table of pandas or polars, or a path.
            validation: the share of rows to hold out, or the name of a column that says which.
            feature_columns: what `forward` takes, in order.
            label_columns: what the loss takes, in order, or None.
            seed: of the split.
            recheck: read the rows of files again that were prepared, and have kept names, sizes and
                times.

        Raises:
            ConfigurationError: an argument can't be used.
            DataError: rows can't be used (null, NaN, ragged); names column and row.
            SetupError: Java has ended, or its heap is full.
            StoreError: a disk is full, or the store can't be written.
        """
        require_store(store)
        spec = DataSpec.checked(feature_columns, label_columns, None, validation, seed)
        df = self.rows(df)
        with Waiting(self._report) as waiting:
            return self.prepare(store, df, spec, waiting.now, recheck)

    def rows(self, given: Any) -> Any:
        """Return a DataFrame of Spark for a table of pandas or polars, or a path; else `given`.

        Raises:
            ConfigurationError: there is nothing at the path, or it can't be read.
            DataError: a column of the table can't become one of Spark.
        """
        from pyspark.sql import SparkSession

        from cerebro_hydra.data.preparation.tables import dataframe_of

        with explained_java(self.spark_context, "reading a table"):
            return dataframe_of(given, lambda: SparkSession(self.spark_context))

    def prepare(
        self,
        store: Store,
        df: DataFrame,
        spec: DataSpec,
        tell: Callable[[str], None] = to_nobody,
        recheck: bool = False,
    ) -> Manifest:
        """Do what `prepare_data` does, for a search."""
        from cerebro_hydra.data.preparation.prepare import prepare

        with (
            explained_java(self.spark_context, "preparing rows"),
            no_progress_line(context_of(self.spark_context)),
        ):
            return prepare(df, store, self.num_workers, spec, tell, self._report, recheck)

    def check_factory(self, factory: Factory) -> None:
        """Refuse a factory that can't travel, for a search."""
        pickle_factory(factory)

    def first_rows(self, df: DataFrame, spec: DataSpec, count: int) -> CachedPartition | None:
        """Return the first rows of a query that is cheap to begin, for a search."""
        from cerebro_hydra.data.preparation.prepare import first_rows

        with (
            explained_java(self.spark_context, "reading the first rows"),
            no_progress_line(context_of(self.spark_context)),
        ):
            return first_rows(df, spec, count)

    def identify(
        self,
        store: Store,
        df: DataFrame,
        spec: DataSpec,
        num_partitions: int,
        tell: Callable[[str], None] = to_nobody,
    ) -> RowsFound:
        """Find out which prepared data the rows would become; nothing is written."""
        from cerebro_hydra.data.preparation.prepare import identify

        with (
            explained_java(self.spark_context, "comparing rows"),
            no_progress_line(context_of(self.spark_context)),
        ):
            return identify(df, store, num_partitions, spec, tell)

    def existing_data(
        self,
        store: Store,
        validation: float | str | None = None,
        feature_columns: Sequence[str] = ("features",),
        label_columns: Sequence[str] | None = ("label",),
        seed: int = 0,
    ) -> Manifest:
        """Make the Parquet files of a store's `train_path` and `val_path` its data, as they lie.

        Spark's tasks read all rows once and check them; nothing is written but a manifest. A second
        call with unchanged files reads only their footers.

        Args:
            store: with a `train_path`, or with what Cerebro prepared in its folder.
            validation: None for none; else the rows of `val_path`, or without one the share of rows
                to hold back.
            feature_columns: what `forward` takes, in order.
            label_columns: what the loss takes, in order, or None.
            seed: of what is held back.

        Raises:
            ConfigurationError: the paths or arguments can't be used.
            DataError: rows can't be used (null, NaN, ragged); names column, file and row.
        """
        require_store(store)
        spec = DataSpec.checked(feature_columns, label_columns, None, validation, seed)
        return self.describe(store, spec)

    def describe(self, store: Store, spec: DataSpec) -> Manifest:
        """Do what `existing_data` does, for a search."""
        from cerebro_hydra.data.preparation.existing import describe

        reading = Waiting(self._report, "checking the rows of existing files")
        with (
            explained_java(self.spark_context, "checking the rows of existing files"),
            no_progress_line(context_of(self.spark_context)),
            reading,
        ):
            return describe(store, self.num_workers, spec, self._mapped)

    def get_metadata_from_parquet(
        self,
        store: Store,
        label_columns: Sequence[str] | None = ("label",),
        feature_columns: Sequence[str] = ("features",),
    ) -> ParquetMetadata:
        """Describe a store's data: `(train_rows, val_rows, metadata, avg_row_size)`.

        `metadata` has for each column its type and the shape of a row, of the first one where the
        files were not prepared here; `avg_row_size` is in bytes.

        Raises:
            ConfigurationError: the store has no data, or several sets with these columns.
            DataError: files or columns can't be used.
        """
        from cerebro_hydra.data.preparation.existing import metadata_from

        require_store(store)
        return metadata_from(store, DataSpec.checked(feature_columns, label_columns).columns)

    def _mapped(self, function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        tasks = max(1, min(len(items), _TASKS_PER_WORKER * self.num_workers))
        return by_own_workers(self.spark_context.parallelize(items, tasks).map(function)).collect()

    def _gpu_memory(self, share: float) -> list[int]:
        """Return the bytes that shards and tasks may have on each GPU of the workers.

        Args:
            share: the part of a GPU that a worker has.
        """
        with Waiting(self._report, f"starting CUDA for {self.num_workers} workers"):
            facts = self._mapped(gpu_facts, range(self.num_workers))
        raise_findings([*check_gpu_facts(facts)])
        return [int(nbytes * share) for each in facts for nbytes in each.memory]

    def launcher(self) -> SparkLauncher:
        """Return what starts and stops the agents of one run.

        Raises:
            SetupError: the session has been stopped.
        """
        context_of(self.spark_context)
        return SparkLauncher(
            self.spark_context,
            self.num_workers,
            tls=self.tls,
            limits=self.limits,
            resources=self.resources,
        )


def _machine_facts(scratch: str | None, _: object) -> MachineFacts:
    return machine_facts(scratch or spark_folder())


def _replacement_seconds(spark_context: SparkContext) -> float:
    """Return how long Spark may take to replace a silent executor, and its agent to come.

    Spark notices after `spark.network.timeout`, and looks for that once a minute.
    """
    settings = spark_context._jsc.sc().conf()
    return 2.0 * settings.getTimeAsSeconds("spark.network.timeout", "120s") + 60.0
