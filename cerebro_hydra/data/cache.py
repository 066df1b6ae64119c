"""Caches one partition: decodes its columns once into memory-mapped arrays."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.data.manifest import ColumnSpec, Manifest, PartitionInfo, stored_name
from cerebro_hydra.data.partition_rows import checked_rows
from cerebro_hydra.errors import DataError
from cerebro_hydra.storage import Store


@dataclass(frozen=True)
class CachedPartition:
    """Has a partition's columns as read-only memory maps of shape (rows, *shape of the column)."""

    rows: int
    columns: Mapping[str, NDArray[Any]]

    @classmethod
    def build(
        cls, info: PartitionInfo, manifest: Manifest, store: Store, cache_dir: str
    ) -> CachedPartition:
        """Open the partition's cache; if it is not there, decode the store's files into it first.

        A cache appears whole, by a rename, or not at all. If several processes build the same one,
        the first wins and the others use it.

        Raises:
            DataError: count, row ids or types of the rows are not those of the manifest.
            StoreError: the store can't be read.
        """
        data_path = store.data_path(manifest.fingerprint)
        folder = Path(cache_dir, manifest.fingerprint, f"{info.split}-{info.index:05d}")
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with (
                tempfile.TemporaryDirectory(
                    prefix=".building-", dir=folder.parent, ignore_cleanup_errors=True
                ) as building,
                store.local_copy(data_path, info.path, cache_dir) as copied,
            ):
                try:
                    _decode(info, manifest, copied, building)
                except DataError as error:
                    # The user knows the files in the store, not their passing copies.
                    raise DataError(str(error).replace(copied, data_path)) from error
                try:
                    os.rename(building, folder)
                except OSError:
                    if not folder.is_dir():  # else another process was first
                        raise
        columns = {
            spec.name: _opened(folder / f"{stored_name(i)}.npy", spec, info)
            for i, spec in enumerate(manifest.columns)
        }
        return cls(info.rows, columns)


def _decode(info: PartitionInfo, manifest: Manifest, data_path: str, target: str) -> None:
    maps = [
        np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
            os.path.join(target, f"{stored_name(i)}.npy"),
            mode="w+",
            dtype=np.dtype(spec.dtype),
            shape=(info.rows, *spec.shape),
        )
        for i, spec in enumerate(manifest.columns)
    ]
    start = 0
    for rows in checked_rows(info, manifest, data_path):
        stop = start + len(rows)
        for values, mapped in zip(rows.columns, maps, strict=True):
            mapped[start:stop] = values
        start = stop
    for mapped in maps:
        mapped.flush()


def _opened(path: Path, spec: ColumnSpec, info: PartitionInfo) -> NDArray[Any]:
    try:
        mapped: NDArray[Any] = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(
            f"the cache {str(path)!r} is damaged ({error}): delete its folder"
        ) from error
    if mapped.shape != (info.rows, *spec.shape) or mapped.dtype != np.dtype(spec.dtype):
        raise DataError(
            f"the cache {str(path)!r} holds {mapped.dtype} of shape {mapped.shape}, not "
            f"{spec.dtype} of {(info.rows, *spec.shape)}: delete its folder"
        )
    return mapped
