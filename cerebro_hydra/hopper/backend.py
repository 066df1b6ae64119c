"""Defines where searches run: Spark in production, this machine in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from cerebro_hydra.data.data_spec import DataSpec
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.hopper.launcher import Launcher
from cerebro_hydra.hopper.worker_resources import WorkerResources
from cerebro_hydra.storage import Store


@runtime_checkable
class Backend(Protocol):
    """Offers what a search needs of the place where it runs.

    `num_workers` is the number of agents, and of partitions of the data; `resources` is what each
    of them may train with.
    """

    num_workers: int
    resources: WorkerResources

    def prepare(
        self,
        store: Store,
        df: Any,
        spec: DataSpec,
        tell: Callable[[str], None],
        recheck: bool = False,
    ) -> Manifest:
        """Write rows to the store as prepared data, or find them prepared there already.

        `df` is what this backend takes for a DataFrame; `tell` is given what is done. `recheck`
        asks for a look at all rows, even where the files that they come from have not changed.

        Raises:
            ConfigurationError: the rows don't have the columns of the spec.
            DataError: rows can't be used (null, NaN, ragged); names column and row.
        """
        ...

    def describe(self, store: Store, spec: DataSpec) -> Manifest:
        """Make the existing Parquet files of the store its data, as they lie.

        Raises:
            ConfigurationError: the paths of the store, or the spec, can't be used.
            DataError: rows can't be used (null, NaN, ragged); names column, file and row.
        """
        ...

    def launcher(self) -> Launcher:
        """Return what starts and stops the agents of one run."""
        ...
