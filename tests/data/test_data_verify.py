from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cerebro_hydra.data.partition import check_partitions
from cerebro_hydra.storage import LocalStore, Store
from cerebro_hydra.testing.datasets import write_dataset
from tests.data.existing.existing_stores import describe, write_plain
from tests.storage.shared_files import SharedStore

COLUMNS = {"x": np.random.default_rng(0).normal(size=(90, 3)), "y": np.arange(90)}


def damage(store: Store, path: str) -> None:
    """Exchange two values of a file, whose rows and row ids stay."""
    (name,) = store.list(path)
    with store.open(f"{path}/{name}") as file:
        table = pq.read_table(file, partitioning=None)
    values = table["column_001"].to_numpy().copy()
    values[:2] = values[1::-1]
    sink = pa.BufferOutputStream()
    pq.write_table(table.set_column(2, "column_001", pa.array(values)), sink)
    store.write(f"{path}/{name}", memoryview(sink.getvalue()))


@pytest.mark.parametrize("remote", [False, True])
def test_every_partition_of_a_store_is_checked(tmp_path: Path, remote: bool) -> None:
    store = (SharedStore if remote else LocalStore)(f"{'shared://' * remote}{tmp_path}/store")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    manifest = write_dataset(store, COLUMNS, 3, 0.3)
    checks = list(check_partitions(manifest, store, str(scratch)))
    assert [(each.split, each.index, each.rows) for each in checks] == [
        (info.split, info.index, info.rows) for info in manifest.partitions
    ]
    assert [each.problem for each in checks] == [None] * 6
    data = store.data_path(manifest.fingerprint)
    damage(store, f"{data}/{manifest.partition('train', 1).path}")
    store.delete(f"{data}/{manifest.partition('val', 2).path}")
    problems = [each.problem for each in check_partitions(manifest, store, str(scratch))]
    wrong = manifest.partition("train", 1).path
    assert f"{data}/{wrong}" in problems[1]
    assert "column 'y' has other values" in problems[1]
    assert "partition=00002" in problems[5]
    assert [problems[i] for i in (0, 2, 3, 4)] == [None] * 4
    assert list(scratch.iterdir()) == []


def test_a_fifo_among_the_rows_is_named_and_not_waited_for(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "store"))
    manifest = write_dataset(store, COLUMNS, 1, 0.3)
    folder = f"{store.data_path(manifest.fingerprint)}/{manifest.partition('train', 0).path}"
    file = Path(folder, *store.list(folder))
    file.unlink()
    os.mkfifo(file)
    problem, other = (each.problem for each in check_partitions(manifest, store, str(tmp_path)))
    assert problem is not None and f"{str(file)!r} is no plain file" in problem and other is None


def test_existing_files_are_checked(tmp_path: Path) -> None:
    root = write_plain(tmp_path / "rows", pa.table({"x": np.arange(9.0)}), [[4], [5]])
    store = LocalStore(str(tmp_path / "store"), str(root))
    manifest = describe(store, ["x"], 2, None)
    assert [each.problem for each in check_partitions(manifest, store, str(tmp_path))] == [None] * 2
    (root / "part-00001.parquet").unlink()
    first, second = (each.problem for each in check_partitions(manifest, store, str(tmp_path)))
    assert first is None
    assert second is not None
    assert "part-00001.parquet' is not a whole Parquet file" in second
