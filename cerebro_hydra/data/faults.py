"""Reports faults of a column's rows in the same words wherever rows come from."""

from __future__ import annotations

import os

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cerebro_hydra.errors import DataError

NULL = "is null, or holds null"
UNFIT = {
    "float32": "holds NaN, infinity, or a number beyond float32",
    "int64": "holds a number beyond int64",
}
"""What a number of a column must not be, by the column's dtype."""


def rows_by_fault(
    dtype: str | None, null: NDArray[np.int64], unfit: NDArray[np.int64]
) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each fault, each row once; faults that no row has are left out."""
    rows = {NULL: null, UNFIT.get(dtype or "", ""): unfit}
    return {fault: np.unique(each) for fault, each in rows.items() if each.size}


def row_of_file(path: str, first: int, position: int = 0) -> str:
    """Name the row at a position after row `first` of a file, whose own first row is row 0."""
    return f"row {first + position} of {os.path.normpath(path)!r}"


def unusable(name: str, kind: str, text: bool) -> DataError:
    """Report a column of a type that training can't use."""
    remedy = "drop it, or turn it into numbers first"
    if text:
        remedy = "turn text into numbers first, with StringIndexer or a tokenizer"
    return DataError(
        f"column {name!r} is {kind}: columns are numbers, booleans, arrays of them, or Spark ML "
        f"vectors; {remedy}"
    )


def mixed_types(
    name: str, first: pa.DataType, first_path: str, other: pa.DataType, other_path: str
) -> DataError:
    """Report a column that two files keep in different types."""
    return DataError(
        f"column {name!r} is {first} in {first_path!r} and {other} in {other_path!r}: write all "
        "files with one schema"
    )


def faulty(name: str, fault: str, example: str, counts: tuple[int, int] | None = None) -> DataError:
    """Report rows with a fault such as `NULL`; `counts` are those rows and all rows, if known."""
    rows = "" if counts is None else f"{counts[0]} of {counts[1]} rows, as in "
    return DataError(f"column {name!r} {fault} in {rows}{example}: fill or drop such rows")


def ragged(
    name: str,
    shortest: int,
    longest: int,
    dimension: int,
    example: str,
    expected: tuple[int, ...] | None = None,
) -> DataError:
    """Report rows of several shapes, with the place of a shortest one."""
    target = "one length" if expected is None else f"shape {expected}"
    return DataError(
        f"column {name!r} has arrays of different lengths, from {shortest} to {longest} in "
        f"dimension {dimension}; one of {shortest} is in {example}: pad or cut them to {target}"
    )


def misshapen(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> DataError:
    """Report rows of one shape where another one is expected."""
    return DataError(
        f"column {name!r} has shape {shape} per row where {expected} is expected: give all rows "
        "that shape"
    )


def without_elements(name: str) -> DataError:
    """Report a column whose arrays have length 0."""
    return DataError(f"column {name!r} holds empty arrays: drop the column")
