"""A backend without Spark: arrays for a DataFrame, processes for executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from cerebro_hydra.data.existing import describe
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.storage import Store
from cerebro_hydra.testing.datasets import write_dataset
from cerebro_hydra.testing.local_launcher import LocalLauncher
from cerebro_hydra.wire.credentials import TLS


class Arrays:
    """Named arrays of shape (rows, ...), where a search takes a DataFrame."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.arrays = dict(arrays)

    @property
    def columns(self) -> list[str]:
        return list(self.arrays)


class LocalBackend:
    """What a search needs of a backend, on this machine and without Java.

    Everything but Spark is real: prepared files, agents in processes of their own, the wire,
    the coordinator and its journal. `agents` is the launcher of the latest run, which documents
    `preloaded` and `tls`.
    """

    def __init__(
        self, num_workers: int, preloaded: Sequence[str] = (), tls: bool | TLS = False
    ) -> None:
        self.num_workers = num_workers
        self._preloaded = preloaded
        self._tls = tls
        self.agents = self.launcher()

    def prepare_data(
        self,
        store: Store,
        df: Arrays,
        validation: float | None,
        feature_columns: Sequence[str],
        label_columns: Sequence[str],
        seed: int,
    ) -> Manifest:
        columns = {name: df.arrays[name] for name in (*feature_columns, *label_columns)}
        return write_dataset(store, columns, self.num_workers, validation, seed)

    def existing_data(
        self,
        store: Store,
        validation: float | str | None,
        feature_columns: Sequence[str],
        label_columns: Sequence[str],
        seed: int,
    ) -> Manifest:
        columns = [*feature_columns, *label_columns]
        return describe(store, columns, self.num_workers, validation, seed)

    def launcher(self) -> LocalLauncher:
        self.agents = LocalLauncher(self.num_workers, preloaded=self._preloaded, tls=self._tls)
        return self.agents
