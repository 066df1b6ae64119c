"""Runs a backend without Spark, with arrays for a DataFrame and processes for executors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from cerebro_hydra.data.data_spec import DataSpec
from cerebro_hydra.data.existing import describe
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.hopper.loss_limits import DEFAULT_LIMITS, LossLimits
from cerebro_hydra.hopper.machine_facts import machine_facts
from cerebro_hydra.hopper.worker_resources import WorkerResources
from cerebro_hydra.storage import Store
from cerebro_hydra.testing.datasets import write_dataset
from cerebro_hydra.testing.local_launcher import LocalLauncher
from cerebro_hydra.waits import to_nobody
from cerebro_hydra.wire.credentials import TLS


class Arrays:
    """Named arrays of shape (rows, ...) that stand in for a DataFrame."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.arrays = dict(arrays)

    @property
    def columns(self) -> list[str]:
        return list(self.arrays)


class LocalBackend:
    """Runs a `Backend` on this machine, without Java.

    Everything but Spark is real: prepared files, agents in processes of their own, the wire,
    the coordinator and its journal. `agents` is the launcher of the latest run.

    Args:
        num_workers: agents, and partitions of the data.
        preloaded: modules that agents load before they start; see `LocalLauncher`.
        tls: whether connections are encrypted; see `LocalLauncher`.
        limits: which losses a run outlasts.
        devices_per_worker, device_memory, host_memory, scratch, residents, numerics: see
            `SparkBackend`.
    """

    def __init__(
        self,
        num_workers: int,
        preloaded: Sequence[str] = (),
        tls: bool | TLS = False,
        limits: LossLimits = DEFAULT_LIMITS,
        devices_per_worker: int | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        scratch: str | None = None,
        residents: int | str = "auto",
        numerics: str = "fast",
    ) -> None:
        self.num_workers = num_workers
        self._preloaded = preloaded
        self._tls = tls
        self._limits = limits
        self.resources = WorkerResources.checked(
            devices_per_worker,
            device_memory,
            host_memory,
            scratch,
            residents,
            numerics=numerics,
        ).measured(lambda: [machine_facts(scratch or tempfile.gettempdir())] * num_workers)
        self.agents = self.launcher()

    def prepare(
        self, store: Store, df: Arrays, spec: DataSpec, tell: Callable[[str], None] = to_nobody
    ) -> Manifest:
        """Write arrays as prepared data; `validation` is a share or None."""
        columns = {name: df.arrays[name] for name in spec.columns}
        share = spec.validation_share or None
        return write_dataset(store, columns, self.num_workers, share, spec.seed)

    def describe(self, store: Store, spec: DataSpec) -> Manifest:
        """Make the existing Parquet files of the store its data."""
        return describe(store, self.num_workers, spec)

    def launcher(self) -> LocalLauncher:
        """Return a launcher of local processes, which becomes `agents`."""
        self.agents = LocalLauncher(
            self.num_workers,
            preloaded=self._preloaded,
            tls=self._tls,
            limits=self._limits,
            resources=self.resources,
        )
        return self.agents
