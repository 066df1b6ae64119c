"""Reads the rows of one partition in stored order, whoever wrote them, and caches them decoded.

A stored partition can be verified against its manifest, without training.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cerebro_hydra.data import row_store
from cerebro_hydra.data.batches import may_leave_memory
from cerebro_hydra.data.cells import CELLS, CellPool, numpy_dtype
from cerebro_hydra.data.manifest import (
    ROW_ID,
    Codec,
    ColumnSpec,
    Manifest,
    PartitionInfo,
    RowRange,
    stored_name,
)
from cerebro_hydra.data.parquet import ParquetFolder, check_file, read_range
from cerebro_hydra.data.reader import read_columns
from cerebro_hydra.data.rows import ContentDigest, checksum, split_mask
from cerebro_hydra.errors import DataError, StoreError
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.digest import digest

_DIGESTS = "digests.json"
_NOT_EMPTY = b"\0"  # begins a file of cells, which may all be empty: no such file can be mapped
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowBlock:
    """Holds consecutive rows of a partition."""

    ids: NDArray[np.int64]
    """The row ids; in existing files, positions among the rows of the partition's ranges."""
    columns: tuple[NDArray[Any], ...]
    """An array of shape (rows, *shape of a row) for each column of the manifest; cells are bytes
    objects."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.columns[0])


def partition_title(info: PartitionInfo, manifest: Manifest, data_path: str) -> str:
    """Return how errors name a partition."""
    if manifest.source is None:
        return f"{info.split} partition {info.index} in {os.path.join(data_path, info.path)!r}"
    files = [
        os.path.normpath(os.path.join(data_path, manifest.source.files[row_range.file].path))
        for row_range in info.row_ranges
    ]
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    return f"{info.split} partition {info.index} in {files[0]!r}{more}"


@contextmanager
def local_partition(
    info: PartitionInfo, manifest: Manifest, store: Store, scratch: str | None
) -> Iterator[str]:
    """Yield the data's folder on this machine, or one with a copy of this partition in `scratch`.

    Errors of the block name the files in the store, not their passing copies.
    """
    data_path = store.data_path(manifest.fingerprint)
    with store.local_copy(data_path, info.path, scratch) as copied:
        try:
            yield copied
        except DataError as error:
            raise DataError(str(error).replace(copied, data_path)) from error


def checked_rows(info: PartitionInfo, manifest: Manifest, data_path: str) -> Iterator[RowBlock]:
    """Yield what `read_rows` does, and compare all of it with the manifest at the end.

    Raises:
        DataError: count, row ids, types or contents of the rows are not those of the manifest.
    """
    read = ContentDigest(len(manifest.columns))
    yield from _counted_rows(info, manifest, data_path, read)
    for spec, found, promised in zip(manifest.columns, read.digests, info.digests, strict=True):
        if found != promised:
            remedy = "delete the data and prepare it again"
            if manifest.source is not None:
                remedy = "restore the files, or start a new run on them as they are now"
            raise DataError(
                f"{partition_title(info, manifest, data_path)}: column {spec.name!r} has other "
                f"values than were written: its content digest is {found:016x}, the manifest says "
                f"{promised:016x}; {remedy}"
            )


def _counted_rows(
    info: PartitionInfo, manifest: Manifest, data_path: str, read: ContentDigest
) -> Iterator[RowBlock]:
    """Yield all rows and add them to `read`; their number and ids are compared at the end."""
    what = partition_title(info, manifest, data_path)
    if manifest.source is None:
        promised = ParquetFolder.open(os.path.join(data_path, info.path), ()).rows
        if promised != info.rows:
            raise DataError(
                f"{what}: its Parquet footers count {promised} rows, the manifest {info.rows}; "
                "delete the data and prepare it again"
            )
    ids = np.empty(info.rows, np.int64)
    start = 0
    for rows in read_rows(info, manifest, data_path):
        stop = start + len(rows)
        if stop > info.rows:
            raise DataError(
                f"{what}: the reader gave more rows than the {info.rows} in the footers"
            )
        ids[start:stop] = rows.ids
        read.add(rows.ids, rows.columns)
        yield rows
        start = stop
    if start != info.rows:
        raise DataError(f"{what}: the reader gave {start} rows, the footers promise {info.rows}")
    if info.checksum is not None:
        _check_ids(ids, info.checksum, what)


def _check_ids(ids: NDArray[np.int64], promised: int, what: str) -> None:
    found = checksum(ids)
    if found != promised:
        raise DataError(
            f"{what}: the checksum of its {len(ids)} row ids is {found:016x}, the manifest says "
            f"{promised:016x}, so that rows were lost, repeated or exchanged; delete the "
            "data and prepare it again"
        )
    out_of_order = np.flatnonzero(np.diff(ids) <= 0)
    if out_of_order.size:
        raise DataError(
            f"{what}: row ids are not ascending after row {int(out_of_order[0])}; delete the data "
            "and prepare it again"
        )


def read_rows(info: PartitionInfo, manifest: Manifest, data_path: str) -> Iterator[RowBlock]:
    """Yield all rows of a partition in stored order, a block at a time.

    Raises:
        DataError: files can't be read, are not those of the manifest, or hold other types.
    """
    what = partition_title(info, manifest, data_path)
    if manifest.source is None:
        names = [stored_name(i) for i in range(len(manifest.columns))]
        for group in read_columns(os.path.join(data_path, info.path), [ROW_ID, *names]):
            yield RowBlock(
                group[ROW_ID],
                tuple(
                    _shaped(group[name], spec, what)
                    for name, spec in zip(names, manifest.columns, strict=True)
                ),
            )
        return
    mask = split_mask(info, manifest.source.seed)
    positions = np.arange(info.rows) if mask is None else np.flatnonzero(mask)
    start = done = 0
    for row_range in info.row_ranges:
        file = manifest.source.files[row_range.file]
        path = os.path.normpath(os.path.join(data_path, file.path))
        check_file(path, file)
        chosen = None if mask is None else mask[start : start + row_range.rows]
        start += row_range.rows
        names = [spec.name for spec in manifest.columns]
        for batch in read_range(path, names, row_range.first, row_range.rows, chosen):
            done += batch.num_rows
            yield RowBlock(
                positions[done - batch.num_rows : done],
                tuple(
                    _decoded(batch.column(spec.name), spec, codec, path, row_range)
                    for spec, codec in zip(manifest.columns, manifest.source.codecs, strict=True)
                ),
            )


def _shaped(values: NDArray[Any], spec: ColumnSpec, what: str) -> NDArray[Any]:
    size = int(np.prod(spec.shape, dtype=np.int64))
    if values.dtype != numpy_dtype(spec.dtype) or values.size != len(values) * size:
        raise DataError(
            f"{what}: column {spec.name!r} holds {values.dtype} of shape {values.shape[1:]}, the "
            f"manifest says {spec.dtype} of {spec.shape}; delete the data and prepare it again"
        )
    return values.reshape(len(values), *spec.shape)


def _decoded(
    array: pa.Array, spec: ColumnSpec, codec: Codec | None, path: str, row_range: RowRange
) -> NDArray[Any]:
    def where(_: int) -> str:  # which row it is depends on those that were chosen
        return f"rows {row_range.first} to {row_range.first + row_range.rows - 1}"

    try:
        return row_store.decode(array, codec, spec.dtype).array(spec.name, where, spec.shape)
    except DataError as error:
        # The survey has seen every row, so these are others.
        raise DataError(f"{path!r} has changed since a run was planned on it: {error}") from error


Column = NDArray[Any] | CellPool


@dataclass(frozen=True)
class CachedPartition:
    """Has a partition's columns as read-only memory maps of shape (rows, *shape of the column).

    Columns of cells are pools. `reads_ahead` says whether memory may not hold them all, so that
    pages are asked for in time.
    """

    rows: int
    columns: Mapping[str, Column]
    reads_ahead: bool = False

    @classmethod
    def of(
        cls,
        specs: Sequence[ColumnSpec],
        arrays: Sequence[NDArray[Any]],
        where: Callable[[int], str],
    ) -> CachedPartition:
        """Hold rows at hand: an array for each column, as in `RowBlock`."""
        columns: dict[str, Column] = {}
        for spec, values in zip(specs, arrays, strict=True):
            is_image = spec.dtype == "image"
            cells = spec.dtype in CELLS
            columns[spec.name] = (
                CellPool.of(values, spec.name, where, is_image) if cells else values
            )
        return cls(len(arrays[0]), columns)

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
        columns = _checked(folder, info, manifest, store)
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
) -> Mapping[str, Column]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(
            prefix=".building-", dir=folder.parent, ignore_cleanup_errors=True
        ) as building,
        local_partition(info, manifest, store, cache_dir) as data_path,
    ):
        _decode(info, manifest, data_path, Path(building))
        columns = _mapped(Path(building), info, manifest, store)
        try:
            os.rename(building, folder)
        except OSError:
            # Another process was first, or the folder was cleared away: our own maps stay valid.
            return _checked(folder, info, manifest, store) or columns
    return columns


def _decode(info: PartitionInfo, manifest: Manifest, data_path: str, target: Path) -> None:
    """Write the columns one after another: on a full disk a write fails, but a map is a SIGBUS."""
    paths = [target / f"{stored_name(i)}.npy" for i in range(len(manifest.columns))]
    lengths: list[list[NDArray[np.int64]]] = [[] for _ in paths]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for file, spec in zip(files, manifest.columns, strict=True):
            if spec.dtype in CELLS:
                file.write(_NOT_EMPTY)
                continue
            described = {
                "descr": np.lib.format.dtype_to_descr(np.dtype(spec.dtype)),
                "fortran_order": False,
                "shape": (info.rows, *spec.shape),
            }
            np.lib.format.write_array_header_1_0(file, described)  # type: ignore[no-untyped-call]
        for rows in checked_rows(info, manifest, data_path):
            for i, (values, spec) in enumerate(zip(rows.columns, manifest.columns, strict=True)):
                if spec.dtype in CELLS:
                    files[i].writelines(values)
                    lengths[i].append(np.array([len(cell) for cell in values], np.int64))
                else:
                    files[i].write(np.ascontiguousarray(values, spec.dtype).data)
    for path, found in zip(paths, lengths, strict=True):
        if found:
            np.save(_ends_path(path), np.cumsum(np.concatenate(found), dtype=np.int64))
    digests = [_digest(path) for path in _paths(target, manifest)]
    written = {"partition": info.to_json(), "files": digests}
    (target / _DIGESTS).write_text(json.dumps(written))


def _checked(
    folder: Path, info: PartitionInfo, manifest: Manifest, store: Store
) -> Mapping[str, Column] | None:
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
        return _mapped(folder, info, manifest, store)
    except (OSError, LookupError, ValueError, TypeError, RecursionError) as error:
        _LOGGER.warning("the cache %r is damaged (%s): it is decoded again", str(folder), error)
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _mapped(
    folder: Path, info: PartitionInfo, manifest: Manifest, store: Store
) -> Mapping[str, Column]:
    """Map the columns of a cache.

    Raises:
        OSError: a file is not there.
        ValueError: a file is no array, or one of another type or shape.
    """
    columns: dict[str, Column] = {}
    title = partition_title(info, manifest, store.data_path(manifest.fingerprint))
    for i, spec in enumerate(manifest.columns):
        path = folder / f"{stored_name(i)}.npy"
        if spec.dtype in CELLS:
            ends = np.load(_ends_path(path))
            data = np.memmap(path, np.uint8, "r")[len(_NOT_EMPTY) :]
            if ends.shape != (info.rows,) or ends[-1] != len(data):
                raise ValueError(f"{path.name} holds {len(data)} bytes for {len(ends)} rows")
            where = partial(row_of_partition, title)
            key = f"{manifest.fingerprint}/{info.split}-{info.index}/{i}"
            columns[spec.name] = CellPool(data, ends, spec.name, where, spec.dtype == "image", key)
            continue
        mapped: NDArray[Any] = np.load(path, mmap_mode="r")
        if mapped.shape != (info.rows, *spec.shape) or mapped.dtype != np.dtype(spec.dtype):
            raise ValueError(f"{path.name} holds {mapped.dtype} of shape {mapped.shape}")
        columns[spec.name] = mapped
    return columns


def row_of_partition(title: str, position: int) -> str:
    """Name the row at a position of a partition, as `partition_title` names that."""
    return f"row {position} of {title}"


def _paths(folder: Path, manifest: Manifest) -> list[Path]:
    """Return the files of a cache: one for each column, and for cells one with their ends."""
    own = [(folder / f"{stored_name(i)}.npy", s) for i, s in enumerate(manifest.columns)]
    ends = [_ends_path(path) for path, spec in own if spec.dtype in CELLS]
    return [*(path for path, _ in own), *ends]


def _ends_path(path: Path) -> Path:
    return path.with_suffix(".ends.npy")


def _digest(path: Path) -> str:
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return digest(content)


@dataclass(frozen=True)
class PartitionCheck:
    """Says whether a partition's rows are those of the manifest."""

    split: str
    """"train" or "val"."""
    index: int
    rows: int
    """The rows that the manifest promises."""
    problem: str | None
    """What is wrong and what to do; names partition, column and file as far as known. None if
    every row is as it was written."""


def check_partitions(manifest: Manifest, store: Store, scratch: str) -> Iterator[PartitionCheck]:
    """Read every partition as an agent does, and yield one result for each, in manifest order.

    Counts, row ids, types and contents are compared with the manifest. Nothing raises because of
    damaged data: each result says what is wrong, and the partitions after it are read all the same.

    Args:
        manifest: the data, prepared or existing files.
        store: has it.
        scratch: an existing folder, which is used only for passing copies of remote files.
    """
    for info in manifest.partitions:
        problem = None
        try:
            with local_partition(info, manifest, store, scratch) as data_path:
                for _ in checked_rows(info, manifest, data_path):
                    pass
        except (DataError, StoreError) as error:
            problem = str(error)
        yield PartitionCheck(info.split, info.index, info.rows, problem)
