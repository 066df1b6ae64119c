"""Prepared data from numpy arrays, without a JVM: the files are those that `prepare` writes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cerebro_hydra.data.cells import numpy_dtype
from cerebro_hydra.data.manifest import ROW_ID, ColumnSpec, Manifest, RowsFound, stored_name
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.partition_writer import to_arrow
from cerebro_hydra.data.preparation.prepared import fingerprint_of, prepare_once
from cerebro_hydra.data.rows import AffinePermutation, Assignment, ContentDigest
from cerebro_hydra.errors import DataError
from cerebro_hydra.storage import Store

_DTYPES = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float32}
_ROWS_PER_GROUP = 1000  # small, so that tests read several groups


def write_dataset(
    store: Store,
    columns: Mapping[str, NDArray[Any]],
    num_partitions: int,
    validation: float | None,
    seed: int = 0,
) -> Manifest:
    """Write arrays of shape (rows, ...) as prepared data; integers become int64, floats float32.

    An array of bytes objects is a column of bytes.

    The same rows in any order give the same files, as with `prepare`.

    Raises:
        DataError: an array is not numeric, or there are fewer rows than partitions.
    """
    arrays = {name: _converted(name, array) for name, array in columns.items()}
    specs = _specs(arrays)
    hashes = _row_hashes(list(arrays.values()))
    rows = len(hashes)
    fingerprint = _fingerprint(specs, hashes, num_partitions, validation, seed)
    validation_rows = 0 if validation is None else round(rows * validation)
    assignment = Assignment(rows, validation_rows, num_partitions, validation is not None)
    affine = AffinePermutation.drawn(rows, seed)
    by_rank = np.lexsort((hashes[:, 1], hashes[:, 0]))
    by_id = np.empty(rows, np.int64)
    by_id[[affine(rank) for rank in range(rows)]] = by_rank

    def write(attempt: str) -> Manifest:
        partitions = []
        for info in assignment.partitions(attempt):
            ids = np.asarray(assignment.ids(info.split, info.index), dtype=np.int64)
            rows = [array[by_id[ids]] for array in arrays.values()]
            path = f"{store.data_path(fingerprint)}/{info.path}/part-00000.parquet"
            store.write(path, _parquet(ids, rows))
            written = ContentDigest(len(rows))
            written.add(ids, rows)
            partitions.append(replace(info, digests=written.digests))
        return Manifest(fingerprint, specs, tuple(partitions))

    return prepare_once(store, fingerprint, write)


def first_rows(columns: Mapping[str, NDArray[Any]], count: int) -> CachedPartition | None:
    """Return the first rows of arrays as they would be stored; None if there are fewer."""
    arrays = {name: _converted(name, array[:count]) for name, array in columns.items()}
    fewer = any(len(array) < count for array in arrays.values())
    if fewer:
        return None
    return CachedPartition.of(_specs(arrays), list(arrays.values()), "row {}".format)


def identify(
    columns: Mapping[str, NDArray[Any]],
    num_partitions: int,
    validation: float | None,
    seed: int = 0,
) -> RowsFound:
    """Find out what `write_dataset` would make of arrays; nothing is written."""
    arrays = {name: _converted(name, array) for name, array in columns.items()}
    specs = _specs(arrays)
    hashes = _row_hashes(list(arrays.values()))
    fingerprint = _fingerprint(specs, hashes, num_partitions, validation, seed)
    return RowsFound(fingerprint, len(hashes), f"the values of its {len(hashes):,} rows")


def _fingerprint(
    specs: tuple[ColumnSpec, ...],
    hashes: NDArray[np.uint64],
    num_partitions: int,
    validation: float | None,
    seed: int,
) -> str:
    content = {"rows": len(hashes)}
    for i in range(hashes.shape[1]):
        content[f"sum_{i}"] = int(hashes[:, i].sum(dtype=np.uint64))
    return fingerprint_of(specs, content, num_partitions, validation, seed)


def _specs(arrays: Mapping[str, NDArray[Any]]) -> tuple[ColumnSpec, ...]:
    return tuple(
        ColumnSpec(name, "binary" if a.dtype == object else str(a.dtype), a.shape[1:])
        for name, a in arrays.items()
    )


def _converted(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype == numpy_dtype("binary") and array.ndim == 1:
        return array
    dtype = _DTYPES.get(array.dtype.kind)
    if dtype is None or array.ndim == 0:
        raise DataError(
            f"column {name!r} is {array.dtype} of shape {array.shape}: not rows of numbers"
        )
    return np.ascontiguousarray(array, dtype=dtype)


def _row_hashes(arrays: list[NDArray[Any]]) -> NDArray[np.uint64]:
    """Hash each row over all columns; shape (rows, 2)."""
    rows = len(arrays[0])
    flat = [a if a.dtype == object else a.reshape(rows, -1).view(np.uint8) for a in arrays]
    together = (b"".join(map(bytes, row)) for row in zip(*flat, strict=True))
    digests = [hashlib.blake2b(row, digest_size=16).digest() for row in together]
    return np.frombuffer(b"".join(digests), dtype=np.uint64).reshape(rows, 2)


def _parquet(ids: NDArray[np.int64], columns: list[NDArray[Any]]) -> memoryview:
    table = {ROW_ID: pa.array(ids)}
    table |= {stored_name(i): to_arrow(array) for i, array in enumerate(columns)}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(table), sink, row_group_size=_ROWS_PER_GROUP)
    return memoryview(sink.getvalue())
