"""The conformance suite of readers: inherit `ReaderCase` and give it a reader to pass it."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cerebro_hydra.data.reader import Reader, read_columns
from cerebro_hydra.errors import DataError
from cerebro_hydra.testing.datasets import to_arrow

_NUMBERS = ("int8", "int16", "int32", "int64", "float32", "float64", "bool")


@dataclass(frozen=True)
class PartFile:
    """One file to write: where its rows end, and the rows of its groups, all but the last."""

    stop: int
    group_rows: int


@dataclass(frozen=True)
class Layout:
    """Rows of columns by numpy's name of their type and length, 0 for no list, dealt to files."""

    rows: int
    columns: Mapping[str, tuple[str, int]]
    files: tuple[PartFile, ...]

    def values(self) -> dict[str, NDArray[Any]]:
        """Return every column's rows; no two are equal where the type has enough values."""
        return {
            name: _values(self.rows, *kind, start=7 * i)
            for i, (name, kind) in enumerate(self.columns.items())
        }

    def group_rows(self) -> list[int]:
        """Rows of each row group that has any, in stored order."""
        found, start = [], 0
        for file in self.files:
            rows = file.stop - start
            found += [min(file.group_rows, rows - at) for at in range(0, rows, file.group_rows)]
            start = file.stop
        return found


def _values(rows: int, dtype: str, length: int, start: int) -> NDArray[Any]:
    flat = np.arange(start, start + rows * max(length, 1), dtype=np.int64)
    made: NDArray[Any] = flat
    if dtype == "bool":
        made = flat * 2654435761 % 7 < 3
    elif dtype == "int64":
        made = flat + 2**60  # more than a double holds
    elif dtype.startswith("float"):
        made = flat / 3
    return made.astype(dtype).reshape((rows, length) if length else (rows,))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Columns of every kind over files and row groups of any size, some of them empty."""
    rows = draw(st.integers(1, 60))
    kind = st.tuples(st.sampled_from(_NUMBERS), st.integers(0, 3))
    kinds = draw(st.lists(kind, min_size=1, max_size=4))
    columns = {f"column_{i}": kind for i, kind in enumerate(kinds)}
    stops = sorted([*draw(st.lists(st.integers(0, rows), max_size=4)), rows])
    sizes = draw(st.lists(st.integers(1, 20), min_size=len(stops), max_size=len(stops)))
    return Layout(rows, columns, tuple(map(PartFile, stops, sizes)))


def write_layout(folder: Path, layout: Layout) -> None:
    """Write the files of a layout; their names are in order, the order of writing is not."""
    arrays = {name: to_arrow(values) for name, values in layout.values().items()}
    table = pa.table(arrays)
    start, tasks = 0, []
    for number, file in enumerate(layout.files):
        tasks.append((f"part-{number:05d}.snappy.parquet", start, file))
        start = file.stop
    for name, first, file in reversed(tasks):
        part = table.slice(first, file.stop - first)
        pq.write_table(part, folder / name, row_group_size=file.group_rows)


class ReaderCase(ABC):
    """Tests what every reader promises; a subclass that pytest collects has `make_reader`."""

    @abstractmethod
    def make_reader(self) -> Reader:
        """Return the reader under test."""

    def read(self, folder: Path, columns: Sequence[str]) -> list[dict[str, NDArray[Any]]]:
        """Return all row groups of a folder, as training gets them."""
        return list(read_columns(str(folder), columns, self.make_reader()))

    # -------------------------------------------------------------- every row, once, in order

    # One suite serves several readers; that is no accident which hypothesis has to warn of.
    @settings(max_examples=25, suppress_health_check=[HealthCheck.differing_executors])
    @given(layout=layouts())
    def test_every_row_comes_once_in_stored_order_with_its_type(self, layout: Layout) -> None:
        """Uneven files and row groups, empty files, every type and length."""
        self.check(layout)

    def check(self, layout: Layout) -> None:
        """Write a layout, and compare what is read of it with what was written."""
        with tempfile.TemporaryDirectory() as folder:
            write_layout(Path(folder), layout)
            groups = self.read(Path(folder), list(layout.columns))
        assert [len(group["column_0"]) for group in groups] == layout.group_rows()
        for name, expected in layout.values().items():
            together = np.concatenate([group[name] for group in groups])
            assert together.dtype == expected.dtype
            np.testing.assert_array_equal(together, expected)

    def test_files_come_in_the_order_of_their_names(self, tmp_path: Path) -> None:
        """Names are compared as text, whatever order the folder lists them in."""
        for name in ("part-9", "part-10", "a", "part-1"):
            pq.write_table(pa.table({"x": [name == "a", True]}), tmp_path / f"{name}.parquet")
            pq.write_table(pa.table({"x": [ord(name[-1])]}), tmp_path / f"{name}.parquet")
        seen = [int(group["x"][0]) for group in self.read(tmp_path, ["x"])]
        assert seen == [ord(c) for c in "a109"]

    def test_columns_are_those_asked_for(self, tmp_path: Path) -> None:
        """In any order, without those whose names only begin alike."""
        table = {"x": [1, 2], "x_y": [3, 4], "y": [[5.0], [6.0]], "note": ["a", "b"]}
        pq.write_table(pa.table(table), tmp_path / "part-0.parquet")
        (group,) = self.read(tmp_path, ["y", "x"])
        assert list(group) == ["y", "x"]
        assert (group["x"].tolist(), group["y"].tolist()) == ([1, 2], [[5.0], [6.0]])

    def test_numbers_that_are_not_finite_are_no_nulls(self, tmp_path: Path) -> None:
        """NaN and infinities come as they are stored: refusing them is others' business."""
        values = np.array([[np.nan, np.inf], [-np.inf, -0.0]], np.float32)
        table = pa.table({"x": to_arrow(values[:, 0]), "y": to_arrow(values)})
        pq.write_table(table, tmp_path / "part-0.parquet")
        (group,) = self.read(tmp_path, ["x", "y"])
        assert group["x"].tobytes() == values[:, 0].tobytes()
        assert group["y"].tobytes() == values.tobytes()

    def test_bytes_come_as_they_are(self, tmp_path: Path) -> None:
        """Of any length, and with zeros at their end; null is refused with its row."""
        cells = [b"\0", b"", b"two\0\0", bytes(range(256)) * 9, b"x"]
        numbers = pa.array(range(5))
        table = pa.table({"x": pa.array(cells, pa.binary()), "y": numbers})
        pq.write_table(table, tmp_path / "part-0.parquet", row_group_size=3)
        groups = self.read(tmp_path, ["x", "y"])
        assert [type(cell) for group in groups for cell in group["x"]] == [bytes] * 5
        assert [cell for group in groups for cell in group["x"]] == cells
        null = pa.table({"x": pa.array([*cells[:4], None], pa.binary()), "y": numbers})
        pq.write_table(null, tmp_path / "part-0.parquet", row_group_size=3)
        with pytest.raises(DataError, match=r"column 'x' is null.* in row 4 of '.*part-0"):
            self.read(tmp_path, ["x", "y"])

    def test_hidden_files_are_no_data(self, tmp_path: Path) -> None:
        """Readers pass over what Spark and file systems leave beside the rows."""
        pq.write_table(pa.table({"x": [1]}), tmp_path / "part-0.parquet")
        for name in ("_SUCCESS", ".part-0.parquet.crc", ".half.parquet", "_half.parquet"):
            (tmp_path / name).write_bytes(b"no Parquet")
        (group,) = self.read(tmp_path, ["x"])
        assert group["x"].tolist() == [1]

    def test_folder_of_empty_files_gives_nothing(self, tmp_path: Path) -> None:
        """A partition of a split may have no rows."""
        empty = pa.table({"x": pa.array([], pa.int64()), "y": pa.array([], pa.list_(pa.float32()))})
        for number in range(2):
            pq.write_table(empty, tmp_path / f"part-{number}.parquet")
        assert self.read(tmp_path, ["x", "y"]) == []

    def test_row_groups_without_rows_are_passed_over(self, tmp_path: Path) -> None:
        """Some writers leave them, at the start, between and at the end."""
        rows = pa.table({"x": [1, 2], "y": [[0.5], [1.5]]})
        with pq.ParquetWriter(tmp_path / "part-0.parquet", rows.schema) as writer:
            for part in (rows[:0], rows[:1], rows[:0], rows[1:], rows[:0]):
                writer.write_table(part)
        groups = self.read(tmp_path, ["x", "y"])
        assert [group["x"].tolist() for group in groups] == [[1], [2]]
        assert [group["y"].tolist() for group in groups] == [[[0.5]], [[1.5]]]

    def test_reading_may_stop_anywhere_and_start_anew(self, tmp_path: Path) -> None:
        """Admission looks at the first rows only."""
        pq.write_table(pa.table({"x": range(30)}), tmp_path / "part-0.parquet", row_group_size=10)
        reader = self.make_reader()
        for _ in range(3):
            groups = read_columns(str(tmp_path), ["x"], reader)
            assert next(groups)["x"].tolist() == list(range(10))
            groups.close()  # type: ignore[attr-defined]

    # -------------------------------------------------------------- what is refused

    @pytest.mark.parametrize(
        ("kind", "good", "bad"),
        [
            (pa.int64(), 2**60, None),
            (pa.float32(), 0.5, None),
            (pa.bool_(), True, None),
            (pa.list_(pa.float32()), [0.5, 1.5], None),
            (pa.list_(pa.float32()), [0.5, 1.5], [None, 1.5]),
            (pa.list_(pa.int64()), [1, 2], [1, None]),
            (pa.list_(pa.bool_()), [True, False], [None, None]),
        ],
    )
    @pytest.mark.parametrize("statistics", [True, False])
    def test_null_is_refused_with_its_row(
        self, tmp_path: Path, kind: pa.DataType, good: Any, bad: Any, statistics: bool
    ) -> None:
        """In a later row group of a later file, with and without a count in the footer."""
        for number, row in enumerate([good, bad]):
            rows = pa.table({"x": pa.array([good] * 13 + [row] + [good], kind)})
            pq.write_table(
                rows,
                tmp_path / f"part-{number}.parquet",
                row_group_size=5,
                write_statistics=statistics,
            )
        with pytest.raises(DataError, match=r"column 'x' .*null.* row 13 of .*part-1\.parquet"):
            self.read(tmp_path, ["x"])

    @pytest.mark.parametrize("at", ["group", "file", "folder"])
    def test_lists_of_different_lengths_are_refused(self, tmp_path: Path, at: str) -> None:
        """Within a row group, between row groups of a file, and between files."""
        files = [[[1, 2]] * 5 + [[3]] * 5] if at != "folder" else [[[1, 2]], [[3]]]
        for number, rows in enumerate(files):
            pq.write_table(
                pa.table({"x": rows}),
                tmp_path / f"part-{number}.parquet",
                row_group_size=5 if at == "file" else 10,
            )
        with pytest.raises(DataError, match=r"column 'x' .*different lengths.*( 2.*1|1.* 2)"):
            self.read(tmp_path, ["x"])

    def test_missing_column_is_named_with_those_that_are_there(self, tmp_path: Path) -> None:
        """Also where only one of the files lacks it."""
        pq.write_table(pa.table({"x": [1], "y": [1]}), tmp_path / "part-0.parquet")
        pq.write_table(pa.table({"x": [1], "z": [1]}), tmp_path / "part-1.parquet")
        with pytest.raises(DataError, match=r"'y' is not in .*part-1\.parquet'.*\['x', 'z'\]"):
            self.read(tmp_path, ["x", "y"])

    @pytest.mark.parametrize(
        "array",
        [
            pa.array(["text"]),
            pa.array([[b"bytes"]]),
            pa.array([0], pa.timestamp("us")),
            pa.array([[[1.0]]]),
            pa.array([{"a": 1}]),
            pa.array(["text"]).dictionary_encode(),
            pa.array([[1.0]], pa.large_list(pa.float32())),
        ],
        ids=lambda array: str(array.type),
    )
    def test_column_of_no_numbers_is_refused_with_its_type(
        self, tmp_path: Path, array: pa.Array
    ) -> None:
        """Both readers refuse what one could read and another could not."""
        pq.write_table(pa.table({"x": array}), tmp_path / "part-0.parquet")
        with pytest.raises(DataError, match=r"column 'x' in .*part-0\.parquet' is .*cast it"):
            self.read(tmp_path, ["x"])

    def test_types_that_differ_between_files_are_refused(self, tmp_path: Path) -> None:
        """A column has one type."""
        for number, kind in enumerate((pa.int32(), pa.int64())):
            rows = pa.table({"x": pa.array([1], kind)})
            pq.write_table(rows, tmp_path / f"part-{number}.parquet")
        with pytest.raises(DataError, match=r"column 'x' is int32 in .*part-0.* int64 in .*part-1"):
            self.read(tmp_path, ["x"])

    @pytest.mark.parametrize("keep", [0, 3, -1, -40])
    def test_torn_file_is_named(self, tmp_path: Path, keep: int) -> None:
        """A writer has died, or a copy was cut off."""
        for number in range(2):
            pq.write_table(pa.table({"x": range(99)}), tmp_path / f"part-{number}.parquet")
        torn = tmp_path / "part-1.parquet"
        torn.write_bytes(torn.read_bytes()[:keep])
        with pytest.raises(DataError, match=r"part-1\.parquet' is not a whole Parquet file"):
            self.read(tmp_path, ["x"])

    def test_file_damaged_in_the_middle_is_refused(self, tmp_path: Path) -> None:
        """The footer is whole, a page is not."""
        file = tmp_path / "part-0.parquet"
        pq.write_table(pa.table({"x": np.random.default_rng(0).integers(0, 2**62, 999)}), file)
        content = bytearray(file.read_bytes())
        content[4:2000] = b"\xff" * 1996
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"can't read \['x'\] from .*prepare the data again"):
            self.read(tmp_path, ["x"])

    def test_folder_without_files_is_refused(self, tmp_path: Path) -> None:
        """A path that is wrong must not look like a partition without rows."""
        for folder in (tmp_path, tmp_path / "absent"):
            with pytest.raises(DataError, match="no Parquet files"):
                self.read(folder, ["x"])

    @pytest.mark.parametrize("name", ["_common_metadata", "_metadata"])
    def test_pickled_schema_is_refused(self, tmp_path: Path, name: str) -> None:
        """Whatever lies there, nothing of it is unpickled."""
        pq.write_table(pa.table({"x": [1]}), tmp_path / "part-0.parquet")
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match=f"{name}.*unpickle"):
            self.read(tmp_path, ["x"])

    @pytest.mark.parametrize("name", ["_x", "two words", "a.b"])
    def test_name_that_petastorm_cannot_read_is_refused(self, tmp_path: Path, name: str) -> None:
        """Files that one reader reads, every reader reads."""
        pq.write_table(pa.table({name: [1]}), tmp_path / "part-0.parquet")
        with pytest.raises(DataError, match=f"{name}.*rename it"):
            self.read(tmp_path, [name])
