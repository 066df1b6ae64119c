"""Reads Parquet files in a folder: their paths, their footers, and ranges of their rows."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import types
from pyarrow.parquet import FileMetaData

from cerebro_hydra.data import decoder
from cerebro_hydra.data.decoder import decode, row_of_file
from cerebro_hydra.data.manifest import SourceFile
from cerebro_hydra.data.spec import missing_column
from cerebro_hydra.errors import DataError

_BATCH_BYTES = 32 << 20  # bounds a reader's memory, however large the row groups are
_BATCH_ROWS = 1 << 16
_TAIL = 8  # length of the footer, and the magic number

# A schema in these files would be unpickled by petastorm, and ours have none.
_PICKLED = ("_common_metadata", "_metadata")
# Every reader gives these as they are stored.
_ELEMENTS = (
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
    pa.binary(),
)  # fmt: skip


def list_files(root: str) -> list[str]:
    """Return the sorted paths of the files below `root` that hold rows.

    Names that start with `_` or `.` (Spark's `_SUCCESS`, petastorm's `_common_metadata`, checksums)
    are not data; every other file is.

    Raises:
        DataError: there are none, or a file is there twice, by a link of any kind.
    """
    found: list[str] = []
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]
        shown = [name for name in names if not name.startswith(("_", "."))]
        found += [os.path.join(folder, name) for name in shown]
    if not found:
        raise DataError(f"there are no Parquet files in {root!r}: check the path")
    known: dict[str | tuple[int, int], str] = {}
    for path in sorted(found):  # a folder that links to itself has its files first without it
        if (first := known.setdefault(_identity(path), path)) != path:
            raise DataError(
                f"{first!r} and {path!r} are one file, of which a link makes two, so that its rows "
                "would count twice: delete the link"
            )
    return [*known.values()]


def _identity(path: str) -> str | tuple[int, int]:
    """Return what all names of a file have in common."""
    with suppress(OSError):  # nothing is there any more, which its reader tells
        there = os.stat(path)
        if there.st_nlink > 1:  # else numbers may be made up, as for object stores
            return there.st_dev, there.st_ino
    return os.path.realpath(path)


def metadata_of(path: str, file: BinaryIO | None = None) -> pq.FileMetaData:
    """Return the footer of a file on this machine, or of one that was opened elsewhere.

    Raises:
        DataError: it can't be read.
    """
    try:
        if file is None and not stat.S_ISREG(os.stat(path).st_mode):  # a FIFO would be waited for
            raise DataError(f"{path!r} is no plain file: restore it from a copy")
        return pq.read_metadata(path if file is None else file)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path!r} is not a whole Parquet file ({error})") from error


def column_type(schema: pa.Schema, name: str, path: str) -> pa.DataType:
    """Return the type of a file's column.

    Raises:
        DataError: the file at `path` has no such column, or several.
    """
    found = schema.get_all_field_indices(name)
    if not found and f"{os.sep}{name}=" in path:
        raise DataError(
            f"column {name!r} is kept in the names of folders, as in {path!r}: write it into the "
            "files"
        )
    if not found:
        raise DataError(missing_column("column", name, repr(path), schema.names))
    if len(found) > 1:
        raise DataError(f"{path!r} has {len(found)} columns {name!r}: rename them")
    return schema.field(found[0]).type


def describe_file(path: str, named: str) -> SourceFile:
    """Describe a file as it is now, under the name that it has in a manifest.

    Raises:
        DataError: it can't be read.
    """
    metadata = metadata_of(path)
    length = metadata.serialized_size
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size - _TAIL - length)
        footer = hashlib.sha256(file.read(length)).hexdigest()[:32]
    return SourceFile(named, metadata.num_rows, size, footer)


def check_file(path: str, described: SourceFile) -> None:
    """Compare a file with its earlier description.

    Raises:
        DataError: it is gone, or another one lies in its place.
    """
    found = describe_file(path, described.path)
    if found != described:
        raise DataError(
            f"{path!r} has changed since a run was planned on it: it has {found.rows} rows in "
            f"{found.bytes} bytes with footer {found.footer[:8]}, and had {described.rows} in "
            f"{described.bytes} with {described.footer[:8]}"
        )


def read_range(
    path: str,
    columns: Sequence[str],
    first: int,
    rows: int,
    chosen: NDArray[np.bool_] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the columns of consecutive rows in stored order, or only of the `chosen` rows.

    Raises:
        DataError: the file can't be read, or ends before.
    """
    last = first + rows
    done = 0
    try:
        with pq.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            bounds = pairwise(accumulate((group.num_rows for group in groups), initial=0))
            for number, (start, stop) in enumerate(bounds):
                if start == stop or stop <= first or start >= last:
                    continue
                at = start
                per_row = max(1, groups[number].total_byte_size // (stop - start))
                size = min(_BATCH_ROWS, max(1, _BATCH_BYTES // per_row))
                for batch in file.iter_batches(size, row_groups=[number], columns=list(columns)):
                    low, high = max(first - at, 0), min(last - at, batch.num_rows)
                    at += batch.num_rows
                    if low < high:
                        mask = None if chosen is None else chosen[done : done + high - low]
                        part = batch.slice(low, high - low)
                        yield part if mask is None else part.filter(pa.array(mask))
                        done += high - low
                    if at >= last:
                        break
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"can't read {list(columns)} from {path!r}: {error}") from error
    if done != rows:
        raise DataError(
            f"{path!r} gave {done} rows from row {first} on, its footer promises {rows}"
        )


@dataclass(frozen=True)
class ParquetFolder:
    """Lists the files of a folder that have rows, in the order of their names, all of one type."""

    path: str
    files: tuple[str, ...]
    """Whole paths."""
    rows: int
    """The rows that the footers promise."""
    kinds: tuple[pa.DataType, ...]
    """The types of the columns that were asked for."""
    null_free: frozenset[str]
    """Those columns of which the footers count no null."""

    @classmethod
    def open(cls, path: str, columns: Sequence[str]) -> ParquetFolder:
        """Look at the footers, and read no row.

        Hidden files, whose names begin with `.` or `_`, are no data.

        Raises:
            DataError: the folder holds no Parquet file or a pickled schema, a file is not whole, a
                column is missing, is not of numbers, or differs in type between files.
        """
        for name in _PICKLED:
            if os.path.exists(os.path.join(path, name)):
                raise DataError(
                    f"{path!r} holds {name!r}, which petastorm would unpickle; prepared data has "
                    "none: delete the data and prepare it again"
                )
        files = sorted(str(f) for f in Path(path).glob("*.parquet") if f.name[0] not in "._")
        if not files:
            raise DataError(f"there are no Parquet files in {path!r}: check the path")
        filled = []
        rows = 0
        kinds: dict[str, pa.DataType] = {}
        null_free = set(columns)
        for file in files:
            footer = metadata_of(file)
            schema = footer.schema.to_arrow_schema()
            for name in columns:
                kind = column_type(schema, name, file)
                if element_of(kind) not in _ELEMENTS or kind == pa.list_(pa.binary()):
                    raise DataError(
                        f"column {name!r} in {file!r} is {kind}: columns are booleans, signed "
                        "integers, float, double, lists of them, or bytes; cast it to one of these"
                    )
                if kind != kinds.setdefault(name, kind):
                    raise decoder.mixed_types(name, kinds[name], files[0], kind, file)
            null_free -= _may_hold_null(footer)
            rows += footer.num_rows
            if footer.num_rows:
                filled.append(file)
        return cls(path, tuple(filled), rows, tuple(kinds.values()), frozenset(null_free))


def element_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of a list's entries, or the type itself."""
    return kind.value_type if types.is_list(kind) else kind


def _may_hold_null(footer: FileMetaData) -> set[str]:
    """Return the columns for which a row group has no count of nulls, or one above 0.

    A list that is null or empty is counted too.
    """
    found = set()
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns if group.num_rows else 0)):
            statistics = chunk.statistics
            if statistics is None or not statistics.has_null_count or statistics.null_count:
                found.add(chunk.path_in_schema.split(".")[0])
    return found


class ArrowReader:
    """Reads one row group after another, into arrays that share Arrow's memory where they can."""

    name = f"Arrow {pa.__version__}"

    def groups(
        self, folder: ParquetFolder, columns: Sequence[str]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the arrays of each row group; see `data.reader.Reader`."""
        for file in folder.files:
            with pq.ParquetFile(file) as parquet:
                first = 0
                for number in range(parquet.num_row_groups):
                    table = parquet.read_row_group(number, columns=list(columns))
                    where = partial(row_of_file, file, first)
                    yield {name: decode(table[name]).array(name, where) for name in columns}
                    first += table.num_rows
