"""The Parquet files of one folder: which they are, in which order, and whether they can be read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import types

from cerebro_hydra.data.parquet_files import metadata_of
from cerebro_hydra.errors import DataError

# A schema in these files would be unpickled by petastorm, and ours have none.
_PICKLED = ("_common_metadata", "_metadata")

# What every reader gives as it is stored.
_ELEMENTS = (pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())


@dataclass(frozen=True)
class ParquetFolder:
    """The files of a folder that have rows, in the order of their names, all of one type."""

    path: str
    files: tuple[str, ...]
    """Whole paths."""
    kinds: tuple[pa.DataType, ...]
    """Of the columns asked for."""

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
        names = sorted(f.name for f in Path(path).glob("*.parquet") if f.name[0] not in "._")
        if not names:
            raise DataError(f"there are no Parquet files in {path!r}")
        files = []
        kinds: tuple[pa.DataType, ...] | None = None
        for file in (os.path.join(path, name) for name in names):
            footer = metadata_of(file)
            schema = footer.schema.to_arrow_schema()
            found = tuple(_kind(schema, name, file) for name in columns)
            for name, kind, first in zip(columns, found, kinds or found, strict=True):
                if kind != first:
                    raise DataError(
                        f"column {name!r} is {kind} in {file!r} and {first} in the files before "
                        "it: write all files with one type"
                    )
            kinds = found
            if footer.num_rows:
                files.append(file)
        return cls(path, tuple(files), kinds or ())


def _kind(schema: pa.Schema, name: str, file: str) -> pa.DataType:
    places = schema.get_all_field_indices(name)
    if len(places) != 1:
        held = "no column" if not places else f"{len(places)} columns"
        raise DataError(f"{file!r} has {held} {name!r}, its columns are {schema.names}")
    kind = schema.field(places[0]).type
    if element_of(kind) not in _ELEMENTS:
        raise DataError(
            f"column {name!r} in {file!r} is {kind}: columns are booleans, signed integers, float, "
            "double, or lists of them; cast it to one of these"
        )
    return kind


def element_of(kind: pa.DataType) -> pa.DataType:
    """The type of the entries of a list, or the type itself."""
    return kind.value_type if types.is_list(kind) else kind
