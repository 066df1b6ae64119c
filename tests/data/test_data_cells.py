"""Columns of bytes and of Spark's images: read, cached, digested, batched, and given by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cerebro_hydra.data.batches import batches, row_order
from cerebro_hydra.data.cells import IMAGE_TYPE, CellPool
from cerebro_hydra.data.given_rows import feature_tensors
from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.rows import row_hashes
from cerebro_hydra.errors import DataError
from cerebro_hydra.recipe.batch.cells import Cells
from cerebro_hydra.recipe.batch.decoding import Decoding
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.datasets import write_dataset
from tests.data.existing.existing_stores import UNEVEN, describe, read_all, write_plain
from tests.recipe.decoding.pictures import objects, pixels

CELLS = [bytes([i]) * (i * 7 % 50) + b"\0" * (i % 3) for i in range(60)]


def contents(column: Any) -> list[bytes]:
    assert isinstance(column, CellPool)
    return [column.cell(row) for row in range(len(column))]


def test_bytes_are_cached_and_found_again_and_damage_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(str(tmp_path / "store"))
    manifest = write_dataset(
        store, {"x": objects(CELLS), "number": np.arange(60)}, num_partitions=2, validation=None
    )
    parts = read_all(store, manifest, "train", tmp_path / "cache")
    for part in parts:
        assert contents(part.columns["x"]) == [CELLS[i] for i in part.columns["number"]]
    again = read_all(store, manifest, "train", tmp_path / "cache")
    held = [contents(part.columns["x"]) for part in parts]
    assert [contents(part.columns["x"]) for part in again] == held
    assert not caplog.records
    for name in ("column_000.npy", "column_000.ends.npy"):
        path = tmp_path / "cache" / manifest.fingerprint / "train-00000" / name
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
        caplog.clear()
        part = read_all(store, manifest, "train", tmp_path / "cache")[0]
        assert contents(part.columns["x"]) == held[0]
        assert f"damaged ({name} has other content" in caplog.text


def test_a_changed_bit_or_an_exchange_is_seen(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    manifest = write_dataset(store, {"x": objects(CELLS)}, num_partitions=1, validation=None)
    (file,) = Path(store.data_path(manifest.fingerprint)).rglob("*.parquet")
    table = pq.read_table(file, partitioning=None)
    cells = table["column_000"].to_pylist()
    place = next(i for i, cell in enumerate(cells) if len(cell) > 9)
    flipped = [*cells]
    flipped[place] = bytes([cells[place][0] ^ 1]) + cells[place][1:]
    exchanged = [cells[1], cells[0], *cells[2:]]
    assert cells[0] != cells[1]
    for harmed in (flipped, exchanged):
        pq.write_table(table.set_column(1, "column_000", pa.array(harmed, pa.binary())), file)
        with pytest.raises(DataError, match="column 'x' has other values than were written"):
            read_all(store, manifest, "train", tmp_path / "cache")
    assert row_hashes(objects([b"a", b"a\0"])).tolist()[0] != row_hashes(objects([b"a\0"]))[0]


def test_batches_take_rows_of_cells_in_order_and_ask_for_their_pages(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    manifest = write_dataset(store, {"x": objects(CELLS)}, num_partitions=1, validation=None)
    (kept,) = read_all(store, manifest, "train", tmp_path / "cache")
    part = CachedPartition(kept.rows, kept.columns, reads_ahead=True)
    order = row_order(60, 3, 0, 0)
    found = [batch.features[0] for batch in batches(part, ["x"], [], 16, order)]
    assert [len(each) for each in found] == [16, 16, 16, 12]
    decoded = [cell for each in found for cell in Decoding(None).given("x", each)]
    assert decoded == [contents(part.columns["x"])[i] for i in order]
    assert "row 3 of train partition 0 in " in part.columns["x"].where(3)


def test_cells_stay_with_their_rows() -> None:
    cells = Cells.of([2, 0, 1], CellPool.of([b"a", b"", b"cc\0"], "x", "row {}".format))
    repeated = torch.cat([cells[:2], cells[:2]])[:3]
    chosen = cells.clone()[torch.tensor([1, 1])].to("cpu")
    given = [Decoding(None).given("x", each) for each in (cells, repeated, chosen)]
    assert given == [[b"cc\0", b"a", b""], [b"cc\0", b"a", b"cc\0"], [b"a", b"a"]]


def images(count: int = 6, **changes: Any) -> list[dict[str, Any] | None]:
    """Return rows as Spark's image format has them: blue first."""
    made: list[dict[str, Any] | None] = []
    for i in range(count):
        channels = (1, 3, 4)[i % 3]
        drawn = pixels(i, 3 + i, 5, channels)
        blue_first = drawn if channels == 1 else drawn[:, :, [2, 1, 0, 3][:channels]]
        made.append(
            {
                "origin": f"file:/{i}.png", "height": 3 + i, "width": 5, "nChannels": channels,
                "mode": {1: 0, 3: 16, 4: 24}[channels], "data": blue_first.tobytes(),
            } | changes
        )  # fmt: skip
    return made


def test_existing_files_with_bytes_and_images_are_read_where_they_lie(tmp_path: Path) -> None:
    rows = images(60)
    table = pa.table({"image": pa.array(rows, IMAGE_TYPE), "x": pa.array(CELLS, pa.binary())})
    root = write_plain(tmp_path / "rows", table, UNEVEN)
    store = LocalStore(str(tmp_path / "store"), train_path=str(root))
    manifest = describe(store, ["image", "x"], 2, None)
    assert [each.dtype for each in manifest.columns] == ["image", "binary"]
    parts = read_all(store, manifest, "train", tmp_path / "cache")
    assert [cell for part in parts for cell in contents(part.columns["x"])] == CELLS
    decoded = [
        image
        for part in parts
        for batch in batches(part, ["image"], [], 8, None)
        for image in Decoding(None).given("image", batch.features[0])
    ]
    for i, image in enumerate(decoded):
        drawn = torch.from_numpy(pixels(i, 3 + i, 5, (1, 3, 4)[i % 3])).permute(2, 0, 1)
        assert torch.equal(image, drawn)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mode": 18}, "holds an image that can't be used: of another mode"),
        ({"data": b"12"}, "fewer bytes than its size says"),
        ({"height": -1, "mode": -1}, "holds an image that can't be used"),
        (None, "is null, or holds null"),
    ],
)
def test_images_that_cant_be_used_are_refused_with_file_and_row(
    tmp_path: Path, changes: dict[str, Any] | None, said: str
) -> None:
    rows = [*images(5), *([None] if changes is None else images(1, **changes))]
    pq.write_table(pa.table({"image": pa.array(rows, IMAGE_TYPE)}), tmp_path / "rows.parquet")
    store = LocalStore(str(tmp_path / "store"), train_path=str(tmp_path / "rows.parquet"))
    with pytest.raises(DataError, match=rf"'image' .*{said}.* in 1 of 6 rows, as in row 5 of '"):
        describe(store, ["image"], 1, None)


SPECS = [ColumnSpec("x", "binary", ()), ColumnSpec("image", "image", ())]


def test_rows_at_hand_take_the_same_columns() -> None:
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")  # not in every stack that the tests run with
    rows = images(4)
    columns = {"x": CELLS[:4], "image": rows}
    forms = [
        columns,
        [{"x": cell, "image": image} for cell, image in zip(CELLS, rows, strict=False)],
        pandas.DataFrame(columns, index=[4, 3, 2, 1]),
        polars.DataFrame(columns),
        {"x": objects([*map(bytearray, CELLS[:4])]), "image": rows},
    ]
    expected = [Decoding(None).given("x", each) for each in feature_tensors(columns, SPECS)]
    assert expected[0] == CELLS[:4]
    for form in forms:
        x, image = feature_tensors(form, SPECS)
        assert Decoding(None).given("x", x) == expected[0]
        assert all(map(torch.equal, Decoding(None).given("image", image), expected[1]))
    for wrong, said in [
        ({"x": ["text", 3], "image": rows[:2]}, "'x' holds other rows than the binary ones.*bytes"),
        ({"x": [b"1", None], "image": rows[:2]}, "'x' is null, or holds null in row 1"),
        ({"x": [b"1"], "image": [b"1"]}, "'image' holds other rows .* give dicts of"),
        (pandas.DataFrame({"x": [1.5], "image": rows[:1]}), "'x' is double, .* with binary"),
    ]:
        with pytest.raises(DataError, match=said):
            feature_tensors(wrong, SPECS)
