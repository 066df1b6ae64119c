"""Columns of Arrow as numpy arrays, without a copy where Arrow's memory allows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from cerebro_hydra.errors import DataError


def to_numpy(column: pa.Array | pa.ChunkedArray, what: str, first_row: int = 0) -> NDArray[Any]:
    """The values of a column of numbers, booleans, or (nested) lists of them.

    Gives shape (rows,), or (rows, length, ...) for lists; read-only where it is Arrow's memory.

    Args:
        column: as Arrow gave it, sliced and chunked in any way.
        what: how messages call it, as in "column 'x' in 'part-0.parquet'".
        first_row: the number that messages give to the column's first row.

    Raises:
        DataError: a row is null, holds null, or has another length than the row before.
    """
    if isinstance(column, pa.Array):
        return _array(column, what, first_row, 1)
    parts = []
    for chunk in column.chunks:
        if len(chunk):
            parts.append(_array(chunk, what, first_row, 1))
            if parts[-1].shape[1:] != parts[0].shape[1:]:
                raise _ragged(what, first_row, parts[-1].shape[1], parts[0].shape[1])
            first_row += len(chunk)
    if not parts:
        return _array(pa.array([], column.type), what, first_row, 1)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _array(array: pa.Array, what: str, first_row: int, per_row: int) -> NDArray[Any]:
    """Convert `array`, of which each row of the column has `per_row` entries."""
    if array.null_count:
        entry = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(
            f"{what} is null, or holds null, in row {first_row + entry // per_row}: fill or drop "
            "such rows"
        )
    if not _is_list(array.type):
        # Booleans are bits in Arrow, so that theirs must be a copy.
        return array.to_numpy(zero_copy_only=not types.is_boolean(array.type))
    if types.is_fixed_size_list(array.type):
        length = array.type.list_size
        flat = array.flatten()
    else:
        offsets = array.offsets.to_numpy()
        lengths = np.diff(offsets)
        length = int(lengths[0]) if len(lengths) else 0
        other = np.flatnonzero(lengths != length)
        if other.size:
            row = first_row + int(other[0]) // per_row
            raise _ragged(what, row, int(lengths[other[0]]), length)
        start = int(offsets[0]) if len(offsets) else 0
        flat = array.values.slice(start, len(array) * length)
    values = _array(flat, what, first_row, per_row * max(length, 1))
    return values.reshape(len(array), length, *values.shape[1:])


def _ragged(what: str, row: int, length: int, before: int) -> DataError:
    return DataError(
        f"{what} has lists of different lengths: {length} in row {row}, {before} before it; pad or "
        "cut them to one length"
    )


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
