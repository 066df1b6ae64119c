"""The decoder: Arrow's columns as numpy arrays, and the rows with faults in them."""

from __future__ import annotations

import decimal
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cerebro_hydra.data.decoder import decode, dtype_from_arrow
from cerebro_hydra.errors import DataError
from tests.golden import assert_golden, refusal

NULL = "is null, or holds null"
UNFIT = "holds NaN, infinity, or a number beyond float32"


def read(values: Any, kind: pa.DataType, start: int = 0) -> Any:
    """Read values out of the middle of a longer array, as batches are."""
    array = pa.array([*values[:1], *values], kind).slice(1)
    return decode(array.slice(start), dtype_from_arrow("x", kind))


def where(position: int) -> str:
    """Name a row as a reader does that is at row 7 of its file."""
    return f"row {7 + position}"


def array_of(column: Any, shape: tuple[int, ...] | None = None) -> Any:
    """The decoded column's array, or the error that a user would see."""
    return column.array("x", where, shape)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (pa.int8(), "int64"),
        (pa.uint64(), "int64"),
        (pa.float16(), "float32"),
        (pa.float64(), "float32"),
        (pa.decimal128(9, 2), "float32"),
        (pa.bool_(), "bool"),
        (pa.dictionary(pa.int8(), pa.int32()), "int64"),
    ],
)
def test_numbers_have_the_types_that_prepare_gives(kind: pa.DataType, dtype: str) -> None:
    values: list[Any] = [1, 0, 1]
    if pa.types.is_decimal(kind):
        values = [decimal.Decimal(v) for v in values]
    if pa.types.is_floating(kind):
        values = [np.float16(v) if kind == pa.float16() else float(v) for v in values]
    if pa.types.is_boolean(kind):
        values = [bool(v) for v in values]
    found = array_of(read(values, kind, start=1))
    assert found.dtype == dtype
    assert found.tolist() == [0, 1]


LISTS = (
    pa.list_(pa.list_(pa.float64())),
    pa.large_list(pa.list_(pa.float32())),
    pa.list_(pa.list_(pa.float64(), 3)),
    pa.list_(pa.list_(pa.float64()), 2),
)


@given(rows=st.integers(1, 6), start=st.integers(0, 5), kind=st.sampled_from(LISTS))
def test_nested_lists_are_arrays_of_their_shape(rows: int, start: int, kind: pa.DataType) -> None:
    values = np.arange(rows * 6, dtype=np.float64).reshape(rows, 2, 3)
    start = min(start, rows - 1)
    found = array_of(read(values.tolist(), kind, start))
    np.testing.assert_array_equal(found, values[start:].astype(np.float32))


INNER = st.one_of(
    st.none(), st.lists(st.one_of(st.none(), st.sampled_from([1.0, 1e39, np.inf])), max_size=3)
)


@given(rows=st.lists(st.one_of(st.none(), st.lists(INNER, max_size=3)), min_size=1, max_size=8))
def test_rows_with_faults_are_found_at_every_depth(rows: list[Any]) -> None:
    cells = read(rows, pa.list_(pa.list_(pa.float64())))
    null, unfit = [], []
    for number, row in enumerate(rows):
        inner = row or []
        flat = [x for each in inner for x in each or []]
        if row is None or None in inner or None in flat:
            null.append(number)
        if any(x is not None and x != 1.0 for x in flat):
            unfit.append(number)
    expected = {NULL: null, UNFIT: unfit}
    assert {k: v.tolist() for k, v in cells.faults.items()} == {
        k: v for k, v in expected.items() if v
    }
    lengths = {0: [(len(row), n) for n, row in enumerate(rows) if row is not None]}
    lengths[1] = [
        (len(each), n) for n, row in enumerate(rows) for each in row or [] if each is not None
    ]
    for dimension, there in lengths.items():
        if there:
            found = cells.lengths[dimension]
            assert (found.shortest, found.longest) == (min(there)[0], max(there)[0])
            assert found.row == min(there)[1]


VECTOR = pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)


def dense(*values: float) -> dict[str, Any]:
    return {"type": 1, "size": None, "indices": None, "values": list(values)}


def sparse(size: int, values: dict[int, float]) -> dict[str, Any]:
    return {"type": 0, "size": size, "indices": list(values), "values": list(values.values())}


def test_vectors_dense_and_sparse() -> None:
    rows = [
        dense(1, 2, 3),
        sparse(3, {2: 5.0}),
        sparse(3, {}),
        dense(0, 0, 7),
        sparse(3, {0: 1, 1: 2}),
    ]
    found = read(rows, VECTOR)
    expected = [[1, 2, 3], [0, 0, 5], [0, 0, 0], [0, 0, 7], [1, 2, 0]]
    assert array_of(found).tolist() == expected
    assert array_of(read(rows, VECTOR, start=2)).tolist() == expected[2:]


def test_faults_of_vectors() -> None:
    rows = [dense(1, 2), None, sparse(2, {1: np.nan}), sparse(3, {0: 1.0}), dense(np.inf, 1)]
    found = read(rows, VECTOR)
    assert {k: v.tolist() for k, v in found.faults.items()} == {NULL: [1], UNFIT: [2, 4]}
    (length,) = found.lengths
    assert (length.shortest, length.longest) == (2, 3)
    with pytest.raises(DataError, match="'x' is null, or holds null in row 8: fill or drop"):
        array_of(found)


def test_a_number_beyond_int64_is_a_fault() -> None:
    assert list(read([1, 2**63], pa.uint64()).faults) == ["holds a number beyond int64"]
    assert array_of(read([1, 2**63 - 1], pa.uint64())).tolist() == [1, 2**63 - 1]


# ------------------------------------------------------------------ arrays as they are stored


def nested(shape: Sequence[int], dtype: str, fixed: bool) -> tuple[pa.Array, NDArray[Any]]:
    values = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    array = pa.array(values.reshape(-1))
    for length, count in zip(shape[:0:-1], np.cumprod(shape)[-2::-1], strict=True):
        if fixed:
            array = pa.FixedSizeListArray.from_arrays(array, length)
        else:
            offsets = np.arange(count + 1, dtype=np.int64) * length
            array = pa.LargeListArray.from_arrays(pa.array(offsets), array)
    return array, values


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "int64", "bool"]),
    fixed=st.booleans(),
    cuts=st.lists(st.integers(0, 4), max_size=4),
)
def test_slices_and_chunks_of_nested_lists_are_what_they_are_of_arrays(
    shape: list[int], dtype: str, fixed: bool, cuts: list[int]
) -> None:
    array, values = nested(shape, dtype, fixed)
    cuts = sorted(cut for cut in cuts if cut <= shape[0])
    first, last = (cuts[0], cuts[-1]) if cuts else (0, shape[0])
    sliced = array_of(decode(array.slice(first, last - first)))
    np.testing.assert_array_equal(sliced, values[first:last].reshape(sliced.shape))
    assert sliced.shape == values[first:last].shape or first == last
    assert sliced.dtype == values.dtype
    bounds = [0, *cuts, shape[0]]
    row_ranges = [array.slice(a, b - a) for a, b in pairwise(bounds)]
    np.testing.assert_array_equal(array_of(decode(pa.chunked_array(row_ranges))), values)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 2, 3)])
def test_numbers_are_not_copied(dtype: str, shape: tuple[int, ...]) -> None:
    array, _ = nested(shape, dtype, fixed=False)
    leaf = array
    while hasattr(leaf, "values"):
        leaf = leaf.values
    seen = array_of(decode(array.slice(1)))
    row = int(np.prod(shape[1:], dtype=np.int64)) * seen.itemsize
    assert seen.__array_interface__["data"][0] == leaf.buffers()[1].address + row
    assert not seen.flags.writeable


KINDS = {
    "text": pa.string(),
    "lists of texts by number": pa.list_(pa.dictionary(pa.int8(), pa.string())),
    "times": pa.timestamp("ms"),
    "structs": pa.struct([("a", pa.int32())]),
    "lists of bytes": pa.list_(pa.binary()),
}
FAULTY: tuple[list[Any], ...] = (
    [[[1], [2]], [[3], None], [[4], [5]]],
    [[[1], [2]], [[3], [4]], [[5], [None]]],
    [[[1], [2]], [[3], [4]], None],
    [[[1], [2]], [[3], [4]], [[5]]],
    [[[1], [2]], [[3], [4, 5]], [[6], [7]]],
)
MISSHAPEN: tuple[list[Any], ...] = ([[1, 2], [3, 4]], [[1, 2, 3], [4]])


def test_types_faults_and_shapes_that_can_not_be_decoded_name_the_row() -> None:
    nested, flat = pa.list_(pa.list_(pa.int64())), pa.list_(pa.int64())

    def chunked(rows: list[Any]) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array([row], nested) for row in rows])

    found = {
        name: refusal(partial(dtype_from_arrow, "x", kind)).replace(str(kind), "KIND")
        for name, kind in KINDS.items()
    }
    for rows in FAULTY:
        for column in (pa.array(rows, nested), chunked(rows)):
            said = refusal(partial(array_of, decode(column)))
            assert found.setdefault(str(rows), said) == said, "the same of chunks"
    for rows in MISSHAPEN:
        found[f"{rows} for (3,)"] = refusal(partial(array_of, decode(pa.array(rows, flat)), (3,)))
    assert_golden(Path(__file__).with_name("golden") / "refused_columns.txt", found)
    assert array_of(decode(pa.array([], flat)), (3,)).shape == (0, 3)


def test_numbers_that_are_not_finite_are_only_faults_of_a_dtype() -> None:
    stored = pa.array([1.0, np.nan, np.inf])
    np.testing.assert_array_equal(array_of(decode(stored)), [1.0, np.nan, np.inf])
    with pytest.raises(DataError, match=r"'x' holds NaN, infinity, .* in row 8: fill or drop"):
        array_of(decode(stored, "float32"))
