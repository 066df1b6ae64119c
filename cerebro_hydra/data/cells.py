"""Arrow's columns as numpy arrays of the types that training takes, with what is wrong in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cerebro_hydra.data import faults

_DTYPES = {"b": "bool", "i": "int64", "u": "int64", "f": "float32"}
_VECTOR = ("type", "size", "indices", "values")


@dataclass(frozen=True)
class Lengths:
    """Of all arrays in one dimension."""

    shortest: int
    longest: int
    row: int
    """The first one with the shortest."""


@dataclass(frozen=True)
class Cells:
    """Consecutive rows of one column."""

    rows: int
    values: NDArray[Any]
    """All numbers of all rows, one after another, in the column's type."""
    lengths: tuple[Lengths, ...]
    faults: Mapping[str, NDArray[np.int64]]
    """Rows by what is wrong in them; then `values` may have fewer."""

    def shaped(self) -> NDArray[Any] | None:
        """The values of shape (rows, *shape of a row); None if the rows have faults."""
        if self.faults or any(each.shortest != each.longest for each in self.lengths):
            return None
        return self.values.reshape(self.rows, *(each.longest for each in self.lengths))


def dtype_of(dtype: np.dtype[Any]) -> str | None:
    """The column type for numbers of a numpy type; None if they are no numbers."""
    return _DTYPES.get(dtype.kind)


def arrow_dtype(name: str, kind: pa.DataType) -> str:
    """The column type for a type of Arrow's.

    Raises:
        DataError: it is none that training can use.
    """
    dtype = "float32" if is_vector(kind) else converted_kind(kind).split()[-1]
    if dtype in _DTYPES.values():
        return dtype
    element = kind
    while _is_list(element) or pa.types.is_dictionary(element):
        element = element.value_type
    text = pa.types.is_string(element) or pa.types.is_large_string(element)
    raise faults.unusable(name, str(kind), text)


def converted_kind(kind: pa.DataType) -> str:
    """What an Arrow type becomes, such as "list list float32"; its own name if nothing.

    Types that differ in width, names of fields or where null may be become one.
    """
    if is_vector(kind):
        return "vector"
    if pa.types.is_dictionary(kind):
        return converted_kind(kind.value_type)
    if _is_list(kind):
        return f"list {converted_kind(kind.value_type)}"
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind):
        return "int64"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "float32"
    return str(kind)


def is_vector(kind: pa.DataType) -> bool:
    """Whether values are Spark ML vectors, as Spark writes them to Parquet."""
    return pa.types.is_struct(kind) and tuple(field.name for field in kind) == _VECTOR


def cells_of(array: pa.Array, dtype: str, through: str | None = None) -> Cells:
    """Read numbers, lists of them, or vectors.

    `through` is the numpy type that petastorm would give scalars before they become `dtype`.
    """
    if is_vector(array.type):
        return _vectors(array)
    levels = _Levels()
    level = array
    lengths = []
    nulls = []
    while True:
        if pa.types.is_dictionary(level.type):
            level = level.dictionary_decode()
        present, null = levels.present(level)
        nulls.append(null)
        if not _is_list(level.type):
            break
        lengths.append(levels.enter(pc.list_value_length(present).to_numpy(zero_copy_only=False)))
        level = pc.list_flatten(present)
    values, unfit = converted(_numbers(present), dtype, through)
    wrong = faults.found(dtype, np.concatenate(nulls), levels.rows(unfit))
    return Cells(len(array), values, tuple(lengths), wrong)


class _Levels:
    """Finds the row that an element of nested lists lies in."""

    def __init__(self) -> None:
        self._kept: NDArray[np.int64] | None = None
        self._up: list[tuple[NDArray[np.int64], NDArray[np.int64] | None]] = []

    def present(self, level: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
        """The elements that are not null, and the rows of those that are."""
        self._kept = None
        if not level.null_count:
            return level, np.empty(0, np.int64)
        null = level.is_null().to_numpy(zero_copy_only=False)
        rows = self.rows(np.flatnonzero(null))
        self._kept = np.flatnonzero(~null)
        return level.drop_null(), rows

    def enter(self, lengths: NDArray[Any]) -> Lengths:
        """Go one dimension deeper, into arrays of these lengths."""
        if not lengths.size:
            self._up.append((np.empty(0, np.int64), self._kept))
            return Lengths(0, 0, 0)
        at = int(lengths.argmin())
        found = Lengths(
            int(lengths[at]), int(lengths.max()), int(self.rows(np.array([at], np.int64))[0])
        )
        self._up.append((np.cumsum(lengths, dtype=np.int64), self._kept))
        return found

    def rows(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sorted rows of elements that `present` kept at this level."""
        if self._kept is not None:
            positions = self._kept[positions]
        for ends, kept in reversed(self._up):
            positions = np.searchsorted(ends, positions, side="right")
            if kept is not None:
                positions = kept[positions]
        return np.unique(positions)


def _numbers(array: pa.Array) -> NDArray[Any]:
    if pa.types.is_decimal(array.type):
        array = pc.cast(array, pa.float64())
    numbers: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def converted(
    numbers: NDArray[Any], dtype: str, through: str | None = None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The numbers in a column's type, and the positions of those that it can't take."""
    none = np.empty(0, np.int64)
    if through is not None:
        numbers = numbers.astype(np.dtype(through), copy=False)
    if dtype == "int64" and numbers.dtype == np.uint64:
        return numbers.astype(dtype), np.flatnonzero(numbers > np.iinfo(np.int64).max)
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and is found as that
        values = numbers.astype(dtype, copy=False)
    if dtype != "float32":
        return values, none
    finite = np.isfinite(values)
    return values, none if finite.all() else np.flatnonzero(~finite)


def _vectors(array: pa.StructArray) -> Cells:
    """Spark ML vectors, dense (type 1: values) and sparse (type 0: size, indices, values)."""
    levels = _Levels()
    present, null = levels.present(array)
    kept = np.setdiff1d(np.arange(len(array)), null)
    kind, size, indices, values = present.flatten()
    counts = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    sparse = kind.to_numpy(zero_copy_only=False) == 0
    sizes = np.where(sparse, pc.fill_null(size, 0).to_numpy(zero_copy_only=False), counts)
    lengths = levels.enter(sizes)
    numbers, unfit = converted(_numbers(pc.list_flatten(values)), "float32")
    # Of a sparse vector there are fewer numbers than its size.
    rows = np.repeat(np.arange(len(present)), counts)
    starts = np.cumsum(sizes) - sizes
    within = np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)
    if sparse.any():
        within[sparse[rows]] = pc.list_flatten(indices.filter(pa.array(sparse))).to_numpy()
    out = np.zeros(int(sizes.sum()), np.float32)
    out[starts[rows] + within] = numbers
    return Cells(len(array), out, (lengths,), faults.found("float32", null, kept[rows[unfit]]))


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
