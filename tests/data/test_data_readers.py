from __future__ import annotations

import importlib.metadata
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from cerebro_hydra.data import petastorm_reader, reader
from cerebro_hydra.data.parquet import ArrowReader, ParquetFolder
from cerebro_hydra.data.petastorm_reader import PetastormReader
from cerebro_hydra.testing.reader_case import Layout, PartFile, ReaderCase

OBSTACLE = petastorm_reader.obstacle()


class TestArrowReader(ReaderCase):
    def make_reader(self) -> reader.Reader:
        return ArrowReader()


@pytest.fixture(scope="module")
def looks_often() -> Iterator[None]:
    """Let petastorm look for its next row group more often than ten times a second."""
    from petastorm.workers_pool import dummy_pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dummy_pool, "sleep", lambda _: time.sleep(0.001))
        yield


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
@pytest.mark.usefixtures("looks_often")
class TestPetastormReader(ReaderCase):
    def make_reader(self) -> reader.Reader:
        return PetastormReader()


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
@pytest.mark.usefixtures("looks_often")
def test_rows_are_read_to_their_end_though_petastorms_own_thread_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It notes that there are no more row groups after it has handed out the last one."""
    from petastorm.workers_pool import dummy_pool

    handed_out, ventilate = [], dummy_pool.DummyPool.ventilate

    def late(*given: Any, **more: Any) -> None:
        ventilate(*given, **more)
        handed_out.append(more)
        if len(handed_out) == 2:
            threading.Event().wait(0.5)  # whoever has read both asks for the next one

    monkeypatch.setattr(dummy_pool.DummyPool, "ventilate", late)
    table = pa.table({"x": pa.array(range(6), pa.int64())})
    pq.write_table(table, tmp_path / "part-0.parquet", row_group_size=3)
    read: list[Any] = []

    def go() -> None:
        read.extend(reader.read_columns(str(tmp_path), ["x"], PetastormReader()))

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert [each["x"].tolist() for each in read] == [[0, 1, 2], [3, 4, 5]]


def not_read(*_: Any) -> Any:
    pytest.fail("the rows were read again")


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
@pytest.mark.parametrize("kind", [pa.float32(), pa.list_(pa.float64())], ids=str)
def test_what_the_footers_vouch_for_is_read_once(
    tmp_path: Path, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN and infinities look like the nulls of petastorm; the footers count no null."""
    numbers = [float("nan"), float("inf"), -float("inf"), 1.0]
    rows = [[x, x] for x in numbers] if pa.types.is_list(kind) else numbers
    pq.write_table(pa.table({"x": pa.array(rows, kind)}), tmp_path / "part-0.parquet")
    monkeypatch.setattr(ArrowReader, "groups", not_read)
    (group,) = reader.read_columns(str(tmp_path), ["x"], PetastormReader())
    np.testing.assert_array_equal(group["x"], np.array(rows))


# ------------------------------------------------------------------ the suite notices


Groups = Iterator[dict[str, NDArray[Any]]]


FAULTS = (
    "loses the last row", "loses a row and repeats another", "exchanges groups", "gives doubles",
    "joins groups",
)  # fmt: skip


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


@pytest.mark.parametrize("fault", FAULTS)
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


@pytest.mark.parametrize(
    ("petastorm", "pyarrow", "said"),
    [
        (None, pa.__version__, f"Arrow {pa.__version__} (petastorm is not installed)"),
        ("0.12.1", "15.0.0", "petastorm 0.12.1 fails with pyarrow 15.0.0"),
        ("0.12.1", "14.0.2", "petastorm 0.12.1 can't be imported"),
    ],
)
def test_where_petastorm_can_not_be_had_arrow_is_chosen_and_said(
    fresh_choice: None,
    monkeypatch: pytest.MonkeyPatch,
    petastorm: str | None,
    pyarrow: str,
    said: str,
) -> None:
    def version(name: str) -> str:
        if petastorm is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return petastorm

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(pa, "__version__", pyarrow)
    # Python's own mark for a module whose import must fail.
    monkeypatch.setitem(sys.modules, "petastorm.reader", None)
    monkeypatch.setitem(sys.modules, "petastorm", None)
    assert isinstance(reader.chosen_reader(), ArrowReader)
    assert said in reader.reader_title()
