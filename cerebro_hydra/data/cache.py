"""Caches one partition: decodes its columns once into memory-mapped arrays."""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.data.manifest import Manifest, PartitionInfo, stored_name
from cerebro_hydra.data.partition_rows import checked_rows, local_partition
from cerebro_hydra.data.read_ahead import may_leave_memory
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.digest import digest

_DIGESTS = "digests.json"
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedPartition:
    """Has a partition's columns as read-only memory maps of shape (rows, *shape of the column).

    `reads_ahead` says whether memory may not hold them all, so that pages are asked for in time.
    """

    rows: int
    columns: Mapping[str, NDArray[Any]]
    reads_ahead: bool = False

    @classmethod
    def build(
        cls, info: PartitionInfo, manifest: Manifest, store: Store, cache_dir: str
    ) -> CachedPartition:
        """Open the partition's cache; if it is not there whole, decode the store's files into it.

        A cache that is found is compared with the digests that its writer left beside it; one that
        is damaged, or lacks files, is made again. A cache appears whole, by a rename, or not at
        all. If several processes build the same one, the first wins and the others use it. Maps
        that are open stay valid when the folder is deleted.

        Raises:
            DataError: count, row ids, types or contents of the rows are not those of the manifest.
            StoreError: the store can't be read, or the disk of `cache_dir` can't be written.
        """
        folder = Path(cache_dir, manifest.fingerprint, f"{info.split}-{info.index:05d}")
        columns = _checked(folder, info, manifest)
        if columns is None:
            try:
                columns = _built(folder, info, manifest, store, cache_dir)
            except OSError as error:
                raise StoreError(
                    f"can't decode rows into the scratch folder {cache_dir!r}: {error}; free space "
                    "there, or choose another disk (spark.local.dir, or TMPDIR without Spark)"
                ) from error
        nbytes = sum(column.nbytes for column in columns.values())
        return cls(info.rows, columns, may_leave_memory(nbytes))


def _built(
    folder: Path, info: PartitionInfo, manifest: Manifest, store: Store, cache_dir: str
) -> Mapping[str, NDArray[Any]]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(
            prefix=".building-", dir=folder.parent, ignore_cleanup_errors=True
        ) as building,
        local_partition(info, manifest, store, cache_dir) as data_path,
    ):
        _decode(info, manifest, data_path, Path(building))
        columns = _mapped(Path(building), info, manifest)
        try:
            os.rename(building, folder)
        except OSError:
            # Another process was first, or the folder was cleared away: our own maps stay valid.
            return _checked(folder, info, manifest) or columns
    return columns


def _decode(info: PartitionInfo, manifest: Manifest, data_path: str, target: Path) -> None:
    """Write the columns one after another: on a full disk a write fails, but a map is a SIGBUS."""
    paths = _paths(target, manifest)
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for file, spec in zip(files, manifest.columns, strict=True):
            described = {
                "descr": np.lib.format.dtype_to_descr(np.dtype(spec.dtype)),
                "fortran_order": False,
                "shape": (info.rows, *spec.shape),
            }
            np.lib.format.write_array_header_1_0(file, described)  # type: ignore[no-untyped-call]
        for rows in checked_rows(info, manifest, data_path):
            for values, file, spec in zip(rows.columns, files, manifest.columns, strict=True):
                file.write(np.ascontiguousarray(values, spec.dtype).data)
    written = {"partition": info.to_json(), "files": [_digest(path) for path in paths]}
    (target / _DIGESTS).write_text(json.dumps(written))


def _checked(
    folder: Path, info: PartitionInfo, manifest: Manifest
) -> Mapping[str, NDArray[Any]] | None:
    """Return the maps of a cache that is there; one that is damaged is deleted."""
    if not folder.is_dir():
        return None
    try:
        written = json.loads((folder / _DIGESTS).read_bytes())
        if written["partition"] != json.loads(json.dumps(info.to_json())):
            raise ValueError("it is that of other rows")
        for path, digest in zip(_paths(folder, manifest), written["files"], strict=True):
            if _digest(path) != digest:
                raise ValueError(f"{path.name} has other content than was written")
        return _mapped(folder, info, manifest)
    except (OSError, LookupError, ValueError, TypeError, RecursionError) as error:
        _LOGGER.warning("the cache %r is damaged (%s): it is decoded again", str(folder), error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _mapped(folder: Path, info: PartitionInfo, manifest: Manifest) -> Mapping[str, NDArray[Any]]:
    """Map the columns of a cache.

    Raises:
        OSError: a file is not there.
        ValueError: a file is no array, or one of another type or shape.
    """
    columns: dict[str, NDArray[Any]] = {}
    for path, spec in zip(_paths(folder, manifest), manifest.columns, strict=True):
        mapped: NDArray[Any] = np.load(path, mmap_mode="r")
        if mapped.shape != (info.rows, *spec.shape) or mapped.dtype != np.dtype(spec.dtype):
            raise ValueError(f"{path.name} holds {mapped.dtype} of shape {mapped.shape}")
        columns[spec.name] = mapped
    return columns


def _paths(folder: Path, manifest: Manifest) -> list[Path]:
    return [folder / f"{stored_name(i)}.npy" for i in range(len(manifest.columns))]


def _digest(path: Path) -> str:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return digest(content)
