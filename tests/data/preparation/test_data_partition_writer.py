from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cerebro_hydra.data.manifest import ROW_ID, PartitionInfo, stored_name
from cerebro_hydra.data.preparation import partition_writer
from cerebro_hydra.data.preparation.partition_writer import (
    Pack,
    PartitionWriter,
    chunks_of,
    to_arrow,
)
from cerebro_hydra.data.reader import read_columns
from cerebro_hydra.data.rows import ContentDigest
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import LocalStore

ROWS = 1000
RANDOM = np.random.default_rng(0)
COLUMNS = [
    RANDOM.normal(size=ROWS).astype(np.float32),
    RANDOM.normal(size=(ROWS, 6)).astype(np.float32),
    RANDOM.integers(-5, 5, ROWS),
    RANDOM.integers(0, 2, ROWS).astype(bool),
    RANDOM.normal(size=ROWS).astype(np.float32),
]
PACKS = (
    Pack((0, 4), "float32", 2, False),
    Pack((1,), "float32", 6, True),
    Pack((2,), "int64", 1, False),
    Pack((3,), "bool", 1, False),
)
HASHES = RANDOM.integers(-(2**63), 2**63 - 1, (2, ROWS))
IDS = range(3, 3 + 4 * ROWS, 4)


def batches() -> list[pa.RecordBatch]:
    """What Spark gives, with an empty batch among it."""
    arrays = [
        to_arrow(np.stack([COLUMNS[i] for i in pack.columns], axis=1).reshape(ROWS, -1))
        for pack in PACKS
    ]
    arrays += [pa.array(each) for each in HASHES]
    found = pa.table(arrays, names=[str(i) for i in range(len(arrays))]).to_batches(130)
    return [found[0].slice(0, 0), *found]


@pytest.fixture
def writer(tmp_path: Path) -> PartitionWriter:
    return PartitionWriter(
        LocalStore(tmp_path / "store"), f"{tmp_path}/store/part/p", PACKS, IDS, 2
    )


def test_what_is_written_is_read_and_told(
    writer: PartitionWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_writer, "_GROUP_BYTES", 10_000)  # so that there are files
    written = writer.write(batches())
    assert written.rows == ROWS
    assert written.sums == tuple(int(each.view(np.uint64).sum(dtype=np.uint64)) for each in HASHES)
    expected = ContentDigest(5)
    expected.add(np.array(IDS), COLUMNS)
    assert written.digests == expected.digests
    assert len(list((tmp_path / "store/part").iterdir())) > 1
    names = [ROW_ID, *(stored_name(i) for i in range(5))]
    groups = list(read_columns(f"{tmp_path}/store/part", names))
    for name, values in zip(names, [np.array(IDS), *COLUMNS], strict=True):
        read = np.concatenate([group[name] for group in groups])
        assert read.dtype == values.dtype
        np.testing.assert_array_equal(read, values)


def test_rows_beyond_those_that_were_counted_are_told_and_not_written(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    writer = PartitionWriter(store, f"{tmp_path}/store/part/p", PACKS, IDS[:10], 2)
    assert writer.write(batches()).rows == ROWS
    (group,) = read_columns(f"{tmp_path}/store/part", [ROW_ID])
    assert len(group[ROW_ID]) == 10


class Rotten(LocalStore):
    def read(self, path: str) -> bytes:
        content = bytearray(super().read(path))
        content[len(content) // 2] ^= 1
        return bytes(content)


def test_bytes_that_change_on_the_way_to_the_disk_are_seen(tmp_path: Path) -> None:
    writer = PartitionWriter(Rotten(tmp_path / "store"), f"{tmp_path}/store/part/p", PACKS, IDS, 2)
    with pytest.raises(StoreError, match=r"p-00000\.parquet' holds other bytes than were just"):
        writer.write(batches())


@pytest.mark.parametrize(("rows", "most"), [(10, 3), (9, 3), (1, 100), (7, 1)])
def test_chunks_are_even_and_together_the_partition(rows: int, most: int) -> None:
    ids = range(2, 2 + 4 * rows, 4)
    info = PartitionInfo("train", 2, rows, 0, "here")
    chunks = chunks_of(info, ids, most)
    assert [each for chunk in chunks for each in chunk.ids] == list(ids)
    sizes = [len(chunk.ids) for chunk in chunks]
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert [chunk.number for chunk in chunks] == list(range(-(-rows // most)))
