from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cerebro_hydra.data import petastorm_reader, reader
from cerebro_hydra.data.arrow_arrays import to_numpy
from cerebro_hydra.data.arrow_reader import ArrowReader
from cerebro_hydra.data.parquet_folder import ParquetFolder
from cerebro_hydra.data.petastorm_reader import PetastormReader
from cerebro_hydra.errors import DataError
from cerebro_hydra.testing.reader_case import Layout, PartFile, ReaderCase

OBSTACLE = petastorm_reader.obstacle()


class TestArrowReader(ReaderCase):
    def make_reader(self) -> reader.Reader:
        return ArrowReader()


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
class TestPetastormReader(ReaderCase):
    def make_reader(self) -> reader.Reader:
        return PetastormReader()


# ------------------------------------------------------------------ the suite notices


Groups = Iterator[dict[str, NDArray[Any]]]


class Broken(ArrowReader):
    """A reader with one fault."""

    name = "broken"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def groups(self, folder: ParquetFolder, columns: Sequence[str]) -> Groups:
        groups = list(super().groups(folder, columns))
        if self.fault == "loses the last row":
            yield from groups[:-1]
            yield {name: values[:-1] for name, values in groups[-1].items()}
        elif self.fault == "loses a row and repeats another":
            yield from groups[:-1]
            yield {
                n: np.concatenate([v[:1], v[:1], v[2:]])[: len(v)] for n, v in groups[-1].items()
            }
        elif self.fault == "exchanges groups":
            yield from reversed(groups)
        elif self.fault == "gives doubles":
            for group in groups:
                yield {name: values.astype(np.float64) for name, values in group.items()}
        elif self.fault == "joins groups":
            yield {n: np.concatenate([group[n] for group in groups]) for n in columns}


@pytest.mark.parametrize(
    "fault",
    [
        "loses the last row",
        "loses a row and repeats another",
        "exchanges groups",
        "gives doubles",
        "joins groups",
    ],
)
def test_the_suite_notices_a_reader_that(fault: str) -> None:
    class Case(ReaderCase):
        def make_reader(self) -> reader.Reader:
            return Broken(fault)

    files = (PartFile(stop=7, group_rows=3), PartFile(stop=12, group_rows=5))
    with pytest.raises(AssertionError):
        Case().check(Layout(12, {"column_0": ("int64", 0), "column_1": ("float32", 2)}, files))


# ------------------------------------------------------------------ the choice


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    for cached in (petastorm_reader.obstacle, reader.chosen_reader):
        cached.cache_clear()
    yield
    for cached in (petastorm_reader.obstacle, reader.chosen_reader):
        cached.cache_clear()


def test_petastorm_is_chosen_where_it_can_be_had() -> None:
    expected = PetastormReader if OBSTACLE is None else ArrowReader
    assert type(reader.chosen_reader()) is expected


def test_without_petastorm_arrow_is_chosen_and_said(
    fresh_choice: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert isinstance(reader.chosen_reader(), ArrowReader)
    assert reader.reader_title() == f"Arrow {pa.__version__} (petastorm is not installed)"


def test_beside_a_pyarrow_that_petastorm_fails_with_arrow_is_chosen_and_said(
    fresh_choice: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.1")
    monkeypatch.setattr(pa, "__version__", "15.0.0")
    assert isinstance(reader.chosen_reader(), ArrowReader)
    assert "petastorm 0.12.1 fails with pyarrow 15.0.0" in reader.reader_title()


def test_petastorm_that_cannot_be_imported_is_passed_over_and_said(
    fresh_choice: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.12.1")
    monkeypatch.setattr(pa, "__version__", "14.0.2")
    # Python's own mark for a module whose import must fail.
    monkeypatch.setitem(sys.modules, "petastorm.reader", None)
    monkeypatch.setitem(sys.modules, "petastorm", None)
    assert isinstance(reader.chosen_reader(), ArrowReader)
    assert "petastorm 0.12.1 can't be imported" in reader.reader_title()


# ------------------------------------------------------------------ Arrow's columns as arrays


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
    sliced = to_numpy(array.slice(first, last - first), "x")
    np.testing.assert_array_equal(sliced, values[first:last].reshape(sliced.shape))
    assert sliced.shape == values[first:last].shape or first == last
    assert sliced.dtype == values.dtype
    bounds = [0, *cuts, shape[0]]
    row_ranges = [array.slice(a, b - a) for a, b in pairwise(bounds)]
    np.testing.assert_array_equal(to_numpy(pa.chunked_array(row_ranges), "x"), values)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 2, 3)])
def test_numbers_are_not_copied(dtype: str, shape: tuple[int, ...]) -> None:
    array, _ = nested(shape, dtype, fixed=False)
    leaf = array
    while hasattr(leaf, "values"):
        leaf = leaf.values
    seen = to_numpy(array.slice(1), "x")
    row = int(np.prod(shape[1:], dtype=np.int64)) * seen.itemsize
    assert seen.__array_interface__["data"][0] == leaf.buffers()[1].address + row
    assert not seen.flags.writeable


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[[1], [2]], [[3], None], [[4], [5]]], "null, in row 8"),
        ([[[1], [2]], [[3], [4]], [[5], [None]]], "null, in row 9"),
        ([[[1], [2]], [[3], [4]], None], "null, in row 9"),
        ([[[1], [2]], [[3], [4]], [[5]]], "lengths: 1 in row 9, 2 before it"),
        ([[[1], [2]], [[3], [4, 5]], [[6], [7]]], "lengths: 2 in row 8, 1 before it"),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_faults_of_nested_lists_name_the_row(rows: list[Any], message: str, chunked: bool) -> None:
    kind = pa.list_(pa.list_(pa.int64()))
    column = pa.array(rows, kind)
    if chunked:
        column = pa.chunked_array([pa.array([row], kind) for row in rows])
    with pytest.raises(DataError, match=f"column 'x'.*{message}"):
        to_numpy(column, "column 'x'", first_row=7)
