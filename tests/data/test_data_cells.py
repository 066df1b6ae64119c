"""Arrow's columns as numpy arrays, and the rows with faults in them."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.data.cells import arrow_dtype, cells_of
from cerebro_hydra.errors import DataError

NULL = "is null, or holds null"
UNFIT = "holds NaN, infinity, or a number beyond float32"


def read(values: Any, kind: pa.DataType, start: int = 0) -> Any:
    """Read values out of the middle of a longer array, as batches are."""
    array = pa.array([*values[:1], *values], kind).slice(1)
    return cells_of(array.slice(start), arrow_dtype("x", kind))


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
    found = read(values, kind, start=1).shaped()
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
    found = read(values.tolist(), kind, start).shaped()
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
    assert found.shaped().tolist() == expected
    assert read(rows, VECTOR, start=2).shaped().tolist() == expected[2:]


def test_faults_of_vectors() -> None:
    rows = [dense(1, 2), None, sparse(2, {1: np.nan}), sparse(3, {0: 1.0}), dense(np.inf, 1)]
    found = read(rows, VECTOR)
    assert {k: v.tolist() for k, v in found.faults.items()} == {NULL: [1], UNFIT: [2, 4]}
    (length,) = found.lengths
    assert (length.shortest, length.longest) == (2, 3)
    assert found.shaped() is None


def test_a_number_beyond_int64_is_a_fault() -> None:
    assert list(read([1, 2**63], pa.uint64()).faults) == ["holds a number beyond int64"]
    assert read([1, 2**63 - 1], pa.uint64()).shaped().tolist() == [1, 2**63 - 1]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (pa.string(), "StringIndexer"),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), "StringIndexer"),
        (pa.timestamp("ms"), "drop it"),
        (pa.struct([("a", pa.int32())]), "drop it"),
        (pa.binary(), "drop it"),
    ],
)
def test_other_types_are_refused_with_a_remedy(kind: pa.DataType, remedy: str) -> None:
    with pytest.raises(DataError, match=rf"column 'x' is .*{remedy}"):
        arrow_dtype("x", kind)
