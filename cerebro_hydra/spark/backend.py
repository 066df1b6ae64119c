"""Where searches run: an existing Spark, checked before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from cerebro_hydra.errors import ConfigurationError, SetupError
from cerebro_hydra.spark import checks
from cerebro_hydra.spark.launcher import SparkLauncher
from cerebro_hydra.spark.session import WORKERS_SETTING
from cerebro_hydra.storage import Store, require_store
from cerebro_hydra.wire.credentials import TLS, new_credentials

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from cerebro_hydra.data.existing import ParquetMetadata
    from cerebro_hydra.data.manifest import Manifest

_T = TypeVar("_T")
_R = TypeVar("_R")
_TASKS_PER_WORKER = 4  # so that files of several sizes keep all of them busy


class SparkBackend:
    """Prepares data and starts agents on a Spark.

    Args:
        spark_context: a SparkContext or SparkSession; None takes the active one.
        num_workers: agents, and partitions of the data. None takes what `local_spark` was asked
            for, else every task slot.
        verbose: 0 is silent, 1 shows progress.
        tls: True encrypts what driver and agents send each other, with a certificate made for each
            run; a `TLS` names the files of one to use instead. docs/cluster.md says more.

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
    ) -> None:
        self.spark_context = context_of(spark_context)
        self.verbose = verbose
        if num_workers is None:
            made_for = self.spark_context.getConf().get(WORKERS_SETTING)
            num_workers = int(made_for) if made_for else checks.slots_of(self.spark_context)
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise ConfigurationError(f"num_workers is {num_workers!r}; it is a whole number from 1")
        new_credentials(tls)  # what can't be used is refused here, not when a run starts
        self.tls = tls
        self.num_workers = num_workers
        checks.check(self.spark_context, num_workers)

    def prepare_data(
        self,
        store: Store,
        df: DataFrame,
        validation: float | str | None = None,
        feature_columns: Sequence[str] = ("features",),
        label_columns: Sequence[str] = ("label",),
        seed: int = 0,
    ) -> Manifest:
        """Write a DataFrame as one folder per partition and split, or find it prepared already.

        Args:
            store: where to.
            df: the rows.
            validation: the share of rows to hold out, or the name of a column that says which.
            feature_columns: what `forward` takes, in order.
            label_columns: what the loss takes, in order.
            seed: of the split.

        Raises:
            ConfigurationError: an argument can't be used.
            DataError: rows can't be used (null, NaN, ragged); names column and row.
        """
        from cerebro_hydra.data.prepare import prepare

        require_store(store)
        columns = _columns(feature_columns, label_columns)
        return prepare(df, store, self.num_workers, validation, columns, seed)

    def existing_data(
        self,
        store: Store,
        validation: float | str | None = None,
        feature_columns: Sequence[str] = ("features",),
        label_columns: Sequence[str] = ("label",),
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
            label_columns: what the loss takes, in order.
            seed: of what is held back.

        Raises:
            ConfigurationError: the paths or arguments can't be used.
            DataError: rows can't be used (null, NaN, ragged); names column, file and row.
        """
        from cerebro_hydra.data.existing import describe

        require_store(store)
        columns = _columns(feature_columns, label_columns)
        return describe(store, columns, self.num_workers, validation, seed, self._mapped)

    def get_metadata_from_parquet(
        self,
        store: Store,
        label_columns: Sequence[str] = ("label",),
        feature_columns: Sequence[str] = ("features",),
    ) -> ParquetMetadata:
        """What a store's data is: `(train_rows, val_rows, metadata, avg_row_size)`.

        `metadata` has for each column its type and the shape of a row, of the first one where the
        files were not prepared here; `avg_row_size` is in bytes.

        Raises:
            ConfigurationError: the store has no data, or several sets with these columns.
            DataError: files or columns can't be used.
        """
        from cerebro_hydra.data.existing import metadata_from

        require_store(store)
        return metadata_from(store, _columns(feature_columns, label_columns))

    def _mapped(self, function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        tasks = max(1, min(len(items), _TASKS_PER_WORKER * self.num_workers))
        return self.spark_context.parallelize(items, tasks).map(function).collect()

    def launcher(self) -> SparkLauncher:
        """What starts and stops the agents of one run."""
        return SparkLauncher(self.spark_context, self.num_workers, tls=self.tls)


def _columns(features: Sequence[str], labels: Sequence[str]) -> tuple[str, ...]:
    from cerebro_hydra.data.faults import column_names

    named = column_names("feature_columns", features)
    if labels:  # none where rows are prepared before it is known what they are for
        named += column_names("label_columns", labels)
    return column_names("feature_columns and label_columns together", named)


def context_of(spark: SparkContext | SparkSession | None) -> SparkContext:
    """The SparkContext in what a user gave, or the active one.

    Raises:
        SetupError: there is none, it has stopped, or it lives behind Spark Connect.
        ConfigurationError: what was given is no Spark.
    """
    from pyspark import SparkContext

    if spark is None:
        active = SparkContext._active_spark_context
        if active is None:
            raise SetupError(
                "no Spark session is active; make one with cerebro_hydra.local_spark(workers=2), "
                "or give spark_context"
            )
        return active
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise SetupError(
            "this session goes through Spark Connect, which has no SparkContext; agents need a "
            "classic session, such as cerebro_hydra.local_spark(workers=2)"
        )
    context = getattr(spark, "sparkContext", spark)
    if not isinstance(context, SparkContext):
        raise ConfigurationError(
            f"spark_context is a {type(spark).__name__}; give a SparkContext or a SparkSession"
        )
    if context._jsc is None:
        raise SetupError("this SparkContext has been stopped; give one that runs")
    return context
