"""Lists the Parquet files of one folder, in order, and what their footers say of the columns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import types
from pyarrow.parquet import FileMetaData

from cerebro_hydra.data import faults
from cerebro_hydra.data.parquet_files import column_type, metadata_of
from cerebro_hydra.errors import DataError

# A schema in these files would be unpickled by petastorm, and ours have none.
_PICKLED = ("_common_metadata", "_metadata")

# Every reader gives these as they are stored.
_ELEMENTS = (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())


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
                if element_of(kind) not in _ELEMENTS:
                    raise DataError(
                        f"column {name!r} in {file!r} is {kind}: columns are booleans, signed "
                        "integers, float, double, or lists of them; cast it to one of these"
                    )
                if kind != kinds.setdefault(name, kind):
                    raise faults.mixed_types(name, kinds[name], files[0], kind, file)
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
