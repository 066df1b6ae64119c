"""Decodes Arrow's columns into numpy arrays; finds the rows that can't be trained on.

Faults are told in the same words wherever rows come from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cerebro_hydra.data import cells
from cerebro_hydra.errors import DataError

_DTYPES = {"b": "bool", "i": "int64", "u": "int64", "f": "float32"}
_VECTOR_FIELDS = ("type", "size", "indices", "values")
_NO_ROWS = np.empty(0, np.int64)

NULL = "is null, or holds null"
UNFIT = {
    "float32": "holds NaN, infinity, or a number beyond float32",
    "int64": "holds a number beyond int64",
}
"""What a number of a column must not be, by the column's dtype."""


@dataclass(frozen=True)
class ListLengths:
    """Holds the lengths of a column's lists in one dimension."""

    shortest: int
    longest: int
    row: int
    """The first row that has a list of the shortest length."""


@dataclass(frozen=True)
class DecodedColumn:
    """Holds consecutive rows of one column."""

    rows: int
    values: NDArray[Any]
    """The numbers of all rows, one after another; or a bytes object per row."""
    lengths: tuple[ListLengths, ...]
    """The lengths of its lists in each dimension; () for numbers."""
    faults: Mapping[str, NDArray[np.int64]]
    """The rows of each fault; where there are any, `values` may lack numbers."""

    @property
    def sound(self) -> bool:
        """Say whether all rows have one shape and no fault."""
        return not self.faults and all(each.shortest == each.longest for each in self.lengths)

    def array(
        self, name: str, where: Callable[[int], str], shape: tuple[int, ...] | None = None
    ) -> NDArray[Any]:
        """Return the values in shape (rows, *shape of a row); read-only if it is Arrow's memory.

        Args:
            name: how messages call the column.
            where: says in messages where the row at a position of this array lies.
            shape: the shape that every row must have; None takes any that all rows have.

        Raises:
            DataError: rows have faults, several shapes, or another shape than `shape`.
        """
        for fault, rows in self.faults.items():
            raise faulty(name, fault, where(int(rows[0])))
        for dimension, found in enumerate(self.lengths):
            if found.shortest != found.longest:
                raise ragged(
                    name, found.shortest, found.longest, dimension, where(found.row), shape
                )
        own = tuple(found.longest for found in self.lengths)
        if shape is not None and shape != own and self.rows:
            raise misshapen(name, own, shape)
        return self.values.reshape(self.rows, *(own if shape is None else shape))


def decode(
    column: pa.Array | pa.ChunkedArray, dtype: str | None = None, through: str | None = None
) -> DecodedColumn:
    """Decode numbers, nested lists of numbers, Spark ML vectors, bytes, or Spark's images.

    Nothing is copied where the dtype stays and the rows hold no null and lie in one chunk; booleans
    are bits in Arrow, so they always are.

    Args:
        column: an Arrow column, sliced and chunked in any way.
        dtype: what the numbers become: "float32", "int64" or "bool". None keeps their own dtype,
            and no number is at fault then. Bytes and images know none: they become cells.
        through: the numpy dtype that the numbers take before `dtype`, as petastorm's scalars do.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if is_vector(column.type):
        return _decode_vectors(column)
    if cells.is_binary(column.type) or cells.is_image(column.type):
        return _decode_cells(column)
    nesting = _Nesting()
    level = column
    lengths = []
    nulls = []
    while True:
        if pa.types.is_dictionary(level.type):
            level = level.dictionary_decode()
        present, null = nesting.drop_null(level)
        nulls.append(null)
        if not _is_list(level.type):
            break
        lengths.append(nesting.enter(pc.list_value_length(present).to_numpy(zero_copy_only=False)))
        level = pc.list_flatten(present)
    values, unfit = convert(_numbers(present), dtype, through)
    found = rows_by_fault(dtype, np.concatenate(nulls), nesting.rows(unfit))
    return DecodedColumn(len(column), values, tuple(lengths), found)


def convert(
    numbers: NDArray[Any], dtype: str | None, through: str | None = None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the numbers in a column's dtype, and the positions of those that it can't take."""
    if through is not None:
        numbers = numbers.astype(np.dtype(through), copy=False)
    if dtype is None:
        return numbers, _NO_ROWS
    if dtype == "int64" and numbers.dtype == np.uint64:
        return numbers.astype(dtype), np.flatnonzero(numbers > np.iinfo(np.int64).max)
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and is found as that
        values = numbers.astype(dtype, copy=False)
    if dtype != "float32":
        return values, _NO_ROWS
    finite = np.isfinite(values)
    return values, _NO_ROWS if finite.all() else np.flatnonzero(~finite)


# ------------------------------------------------------------------ types


def dtype_from_numpy(dtype: np.dtype[Any]) -> str | None:
    """Return the column dtype for numbers of a numpy dtype; None if they are no numbers."""
    return _DTYPES.get(dtype.kind)


def dtype_from_arrow(name: str, kind: pa.DataType) -> str:
    """Return the column dtype for an Arrow type.

    Raises:
        DataError: training can't use the type.
    """
    decoded = decoded_type(kind)
    element = decoded.split()[-1]
    if element in _DTYPES.values() or decoded in cells.CELLS:
        return element
    raise unusable(name, str(kind), text=element in ("string", "large_string"))


def decoded_type(kind: pa.DataType) -> str:
    """Return what an Arrow type becomes, such as "list list float32"; its own name if nothing.

    Types that differ in width, in names of fields, or in where null may be become the same.
    """
    if is_vector(kind):
        return "vector float32"
    if pa.types.is_dictionary(kind):
        return decoded_type(kind.value_type)
    if _is_list(kind):
        return f"list {decoded_type(kind.value_type)}"
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind):
        return "int64"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "float32"
    if cells.is_binary(kind):
        return "binary"
    return "image" if cells.is_image(kind) else str(kind)


def is_vector(kind: pa.DataType) -> bool:
    """Say whether values are Spark ML vectors, as Spark writes them to Parquet."""
    return pa.types.is_struct(kind) and tuple(field.name for field in kind) == _VECTOR_FIELDS


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


# ------------------------------------------------------------------ nested lists and vectors


class _Nesting:
    """Maps elements of nested lists to the rows that they lie in, from the outermost list in."""

    def __init__(self) -> None:
        self._kept: NDArray[np.int64] | None = None
        self._outer: list[tuple[NDArray[Any], NDArray[np.int64] | None]] = []

    def drop_null(self, level: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
        """Return the elements that are not null, and the rows of those that are."""
        if not level.null_count:
            return level, _NO_ROWS
        null = level.is_null().to_numpy(zero_copy_only=False)
        rows = self.rows(np.flatnonzero(null))
        self._kept = np.flatnonzero(~null)
        return level.drop_null(), rows

    def enter(self, lengths: NDArray[Any]) -> ListLengths:
        """Go one dimension in, to the elements of lists of these lengths."""
        found = ListLengths(0, 0, 0)
        if lengths.size:
            shortest = int(lengths.argmin())
            row = int(self.rows(np.array([shortest], np.int64))[0])
            found = ListLengths(int(lengths[shortest]), int(lengths.max()), row)
        self._outer.append((lengths, self._kept))
        self._kept = None
        return found

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sorted rows of elements at positions among those that `drop_null` kept."""
        if not positions.size:
            return _NO_ROWS
        if self._kept is not None:
            positions = self._kept[positions]
        for lengths, kept in reversed(self._outer):
            ends = np.cumsum(lengths, dtype=np.int64)
            positions = np.searchsorted(ends, positions, side="right")
            if kept is not None:
                positions = kept[positions]
        return np.unique(positions)


def _numbers(array: pa.Array) -> NDArray[Any]:
    if pa.types.is_decimal(array.type):
        array = pc.cast(array, pa.float64())
    numbers: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def _decode_vectors(array: pa.StructArray) -> DecodedColumn:
    """Decode dense vectors (type 1: values) and sparse ones (type 0: size, indices, values)."""
    nesting = _Nesting()
    present, null = nesting.drop_null(array)
    kind, size, indices, values = present.flatten()
    counts = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    sparse = kind.to_numpy(zero_copy_only=False) == 0
    sizes = np.where(sparse, pc.fill_null(size, 0).to_numpy(zero_copy_only=False), counts)
    lengths = nesting.enter(sizes)
    numbers, unfit = convert(_numbers(pc.list_flatten(values)), "float32")
    # A sparse vector has fewer numbers than its size.
    rows = np.repeat(np.arange(len(present)), counts)
    starts = np.cumsum(sizes) - sizes
    within = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    if sparse.any():
        within[sparse[rows]] = pc.list_flatten(indices.filter(pa.array(sparse))).to_numpy()
    places = starts[rows] + within
    out = np.zeros(int(sizes.sum()), np.float32)
    out[places] = numbers
    found = rows_by_fault("float32", null, nesting.rows(places[unfit]))
    return DecodedColumn(len(array), out, (lengths,), found)


def _decode_cells(column: pa.Array) -> DecodedColumn:
    nesting = _Nesting()
    present, null = nesting.drop_null(column)
    if cells.is_image(column.type):
        values, unfit = cells.cells_of_images(present)
    else:
        values, unfit = present.to_numpy(zero_copy_only=False), _NO_ROWS
    found = {NULL: null, cells.UNFIT_IMAGE: nesting.rows(unfit)}
    faults = {fault: rows for fault, rows in found.items() if rows.size}
    return DecodedColumn(len(column), values, (), faults)


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
        f"column {name!r} is {kind}: columns are numbers, booleans, arrays of them, Spark ML "
        f"vectors, bytes, or Spark's images; {remedy}"
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
