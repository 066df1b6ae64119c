"""Writes the rows of partitions as they come, and digests them before they are encoded.

```
Spark's sorted rows -> Arrow batches -> arrays -> row ids, content digests
                                               -> Parquet in memory -> the store -> read, compared
```

Encoding and storing overlap with the rows that come next. What is held is a row group, and a file
that is stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cerebro_hydra.data.cells import CELLS
from cerebro_hydra.data.manifest import ROW_ID, PartitionInfo, stored_name
from cerebro_hydra.data.rows import ContentDigest
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.digest import digest

CHUNK = "chunk"
OUTCOME = "chunk int, rows bigint, sums array<string>, digests array<string>, error string"
"""What a task tells, as Spark writes a schema; sums and digests are hexadecimal."""

_OUTCOME_IN_ARROW = pa.schema(
    {
        CHUNK: pa.int32(),
        "rows": pa.int64(),
        "sums": pa.list_(pa.string()),
        "digests": pa.list_(pa.string()),
        "error": pa.string(),
    }
)
_GROUP_BYTES = 32 << 20  # row groups are read whole, so their size bounds a reader's memory
_FILE_GROUPS = 2  # a file is made in memory
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Pack:
    """Names columns that travel from Spark as one column of arrays."""

    columns: tuple[int, ...]
    """The positions of the columns: one that has arrays, or several of numbers."""
    dtype: str
    width: int
    """The numbers in a row."""
    alone: bool
    """Whether it is one column that has arrays or bytes."""


@dataclass(frozen=True)
class Chunk:
    """Is a range of a partition's rows, in the order of their hashes, that one task sorts."""

    info: PartitionInfo
    number: int
    """Its place among the chunks of the partition."""
    ids: range
    """The ids of its rows."""


def chunks_of(info: PartitionInfo, ids: range, most: int) -> list[Chunk]:
    """Part the rows of a partition evenly into chunks of at most so many rows."""
    count = math.ceil(len(ids) / most)
    borders = [len(ids) * i // count for i in range(count + 1)]
    return [Chunk(info, i, ids[start:end]) for i, (start, end) in enumerate(pairwise(borders))]


@dataclass(frozen=True)
class WrittenRows:
    """Tells what was written of one chunk."""

    rows: int
    sums: tuple[int, ...]
    """The sums of the rows' hashes, modulo 2^64, as they came from Spark."""
    digests: tuple[int, ...]
    """The `ContentDigest` of each column."""


class PartitionWriter:
    """Writes the Parquet files of one chunk.

    Args:
        store: where to.
        path: what the paths of its files begin with.
        packs: what the columns of the batches hold, in order.
        ids: the row ids.
        hashes: how many columns of hashes follow those of the packs.
    """

    def __init__(
        self, store: Store, path: str, packs: Sequence[Pack], ids: range, hashes: int
    ) -> None:
        """Write nothing yet."""
        self._store, self._path, self._packs, self._ids = store, path, packs, ids
        self._columns = sum(len(pack.columns) for pack in packs)
        self._sums = [0] * hashes
        self._digest = ContentDigest(self._columns)
        self._rows = self._files = 0
        self._sink = pa.BufferOutputStream()
        self._parquet: pq.ParquetWriter | None = None
        self._groups = 0

    def write(self, batches: Iterable[pa.RecordBatch]) -> WrittenRows:
        """Write all rows; those beyond the ids are counted and not written.

        Raises:
            StoreError: the store can't be written, or holds other bytes than were written.
        """
        with ThreadPoolExecutor(1, "partition-writer") as thread:
            pending: Future[None] | None = None
            for group in _groups(batches):
                if pending is not None:
                    pending.result()
                pending = thread.submit(self._add, group)
            if pending is not None:
                pending.result()
            self._finish_file()
        return WrittenRows(self._rows, tuple(self._sums), self._digest.digests)

    def _add(self, group: Sequence[pa.RecordBatch]) -> None:
        table = pa.Table.from_batches(group)
        for i in range(len(self._sums)):
            hashes = table.column(len(self._packs) + i).to_numpy().view(np.uint64)
            self._sums[i] = (self._sums[i] + int(hashes.sum(dtype=np.uint64))) & _MASK
        ids = np.asarray(self._ids[self._rows : self._rows + len(table)], np.int64)
        self._rows += len(table)
        if len(ids) < len(table):  # more rows than were counted: the sums will tell
            table = table.slice(0, len(ids))
        columns: list[NDArray[Any]] = [np.empty(0)] * self._columns
        for pack, column in zip(self._packs, table.columns, strict=False):
            values = _numbers(column, pack)
            if pack.alone:
                columns[pack.columns[0]] = values
            else:
                for position, each in zip(pack.columns, values.T.copy(), strict=True):
                    columns[position] = each
        self._digest.add(ids, columns)
        self._encode(ids, columns)

    def _encode(self, ids: NDArray[np.int64], columns: Sequence[NDArray[Any]]) -> None:
        table = pa.table(
            {ROW_ID: pa.array(ids)}
            | {stored_name(i): to_arrow(values) for i, values in enumerate(columns)}
        )
        if self._parquet is None:
            # A dictionary of floats that all differ is larger than they are.
            repeated = [
                field.name
                for field in table.schema
                if field.name != ROW_ID and not pa.types.is_floating(_element(field.type))
            ]
            self._parquet = pq.ParquetWriter(
                self._sink, table.schema, compression="snappy", use_dictionary=repeated
            )
        self._parquet.write_table(table, row_group_size=max(1, len(table)))
        self._groups += 1
        if self._groups == _FILE_GROUPS:
            self._finish_file()

    def _finish_file(self) -> None:
        """Store the file, and read it back: what lies there has the digest of what was encoded."""
        if self._parquet is None:
            return
        self._parquet.close()
        content = memoryview(self._sink.getvalue())
        path = f"{self._path}-{self._files:05d}.parquet"
        self._store.write(path, content)
        if digest(self._store.read(path)) != digest(content):
            raise StoreError(
                f"{path!r} holds other bytes than were just written: check the disk or file "
                "system of the store, or choose another"
            )
        self._files, self._groups = self._files + 1, 0
        self._sink, self._parquet = pa.BufferOutputStream(), None


@dataclass(frozen=True)
class WriteJob:
    """Writes the rows of a Spark task, chunk by chunk; travels to the task."""

    store: Store
    data_path: str
    chunks: tuple[Chunk, ...]
    packs: tuple[Pack, ...]
    hashes: int

    def outcome(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield for each chunk what was written, or why not; Spark would try errors again.

        Args:
            batches: the rows in order of their chunks, which the last column numbers.
        """
        for number, of_chunk in groupby(_by_chunk(batches), key=itemgetter(0)):
            told = self._write(number, (rows for _, rows in of_chunk))
            yield pa.RecordBatch.from_pylist([told], schema=_OUTCOME_IN_ARROW)

    def _write(self, number: int, batches: Iterable[pa.RecordBatch]) -> dict[str, Any]:
        chunk = self.chunks[number]
        path = f"{self.data_path}/{chunk.info.path}/part-{chunk.number:05d}"
        writer = PartitionWriter(self.store, path, self.packs, chunk.ids, self.hashes)
        told: dict[str, Any] = {CHUNK: number, "rows": 0, "sums": [], "digests": []}
        try:
            written = writer.write(batches)
        except StoreError as error:
            return {**told, "error": str(error)}
        told["rows"] = written.rows
        told["sums"] = [f"{each:016x}" for each in written.sums]
        told["digests"] = [f"{each:016x}" for each in written.digests]
        return {**told, "error": None}


def _by_chunk(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield batches parted where another chunk begins, each with its number."""
    for batch in batches:
        numbers = batch.column(batch.num_columns - 1).to_numpy()
        begins = [0, *(np.flatnonzero(np.diff(numbers)) + 1)] if len(numbers) else []
        for start, end in pairwise([*begins, len(numbers)]):
            yield int(numbers[start]), batch.slice(start, end - start)


def _groups(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yield the rows of each row group."""
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        per_row = max(1, batch.nbytes // batch.num_rows)
        step = max(1, _GROUP_BYTES // per_row)
        for start in range(0, batch.num_rows, step):
            group.append(batch.slice(start, step))
            size += per_row * group[-1].num_rows
            if size >= _GROUP_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


def _numbers(column: pa.ChunkedArray, pack: Pack) -> NDArray[Any]:
    if pack.dtype in CELLS:
        return column.to_numpy()
    flat = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
    together = np.concatenate(flat) if len(flat) != 1 else flat[0]
    return together.astype(pack.dtype, copy=False).reshape(len(column), pack.width)


def to_arrow(values: NDArray[Any]) -> pa.Array:
    """Return an array of shape (rows, ...) as a column of numbers, flat lists, or bytes."""
    if values.dtype == object:
        return pa.array(values, pa.binary())
    flat = pa.array(values.reshape(-1))
    if values.ndim == 1:
        return flat
    offsets = np.arange(len(values) + 1, dtype=np.int32) * math.prod(values.shape[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_list(kind) else kind
