from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cerebro_hydra.data.cache import CachedPartition
from cerebro_hydra.data.manifest import ROW_ID, Manifest
from cerebro_hydra.data.reader import read_columns
from cerebro_hydra.errors import DataError, StoreError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.datasets import write_dataset

ROWS = 5003
NUMBERS = np.random.default_rng(0)
COLUMNS = {
    # Names that petastorm itself refuses, because they are no Python identifiers.
    "an image/x": NUMBERS.normal(size=(ROWS, 2, 3)),
    "class": np.arange(ROWS, dtype=np.int32) - 7,
    "_flags": NUMBERS.integers(0, 2, size=(ROWS, 3)).astype(bool),
    "ok": np.arange(ROWS) % 3 == 0,
    "weight": NUMBERS.normal(size=ROWS).astype(np.float32),
}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(str(tmp_path / "a store"))


@pytest.fixture
def manifest(store: LocalStore) -> Manifest:
    return write_dataset(store, COLUMNS, num_partitions=3, validation=0.25)


def build(store: LocalStore, manifest: Manifest, split: str = "train", index: int = 0, cache="c"):
    info = manifest.partition(split, index)
    return CachedPartition.build(info, manifest, store, os.path.join(store.prefix, cache))


def file_of(store: LocalStore, manifest: Manifest, split: str = "train", index: int = 0) -> Path:
    folder = Path(store.data_path(manifest.fingerprint), manifest.partition(split, index).path)
    (file,) = folder.glob("*.parquet")
    return file


def rewrite(file: Path, change) -> None:
    pq.write_table(change(pq.read_table(file, partitioning=None)), file)


def test_all_rows_come_back_once_with_type_and_shape(store: LocalStore, manifest: Manifest) -> None:
    parts = [build(store, manifest, info.split, info.index) for info in manifest.partitions]
    assert sum(part.rows for part in parts) == ROWS
    labels = np.concatenate([part.columns["class"] for part in parts])
    assert labels.dtype == np.int64
    back = np.argsort(labels)
    assert labels[back].tolist() == COLUMNS["class"].tolist()
    for name, dtype in [("an image/x", "float32"), ("_flags", "bool"), ("ok", "bool")]:
        together = np.concatenate([part.columns[name] for part in parts])[back]
        assert together.dtype == dtype
        np.testing.assert_array_equal(together, COLUMNS[name].astype(dtype))


def test_stored_order_is_that_of_the_files(store: LocalStore, manifest: Manifest) -> None:
    part = build(store, manifest, "val", 1)
    table = pq.read_table(file_of(store, manifest, "val", 1), partitioning=None)
    assert table[ROW_ID].to_pylist() == sorted(table[ROW_ID].to_pylist())
    assert part.columns["class"].tolist() == table["column_001"].to_pylist()


def test_cache_is_mapped_not_loaded_and_read_only(store: LocalStore, manifest: Manifest) -> None:
    column = build(store, manifest).columns["weight"]
    assert isinstance(column, np.memmap)
    assert not column.flags.writeable


def test_complete_cache_is_used_without_the_files(store: LocalStore, manifest: Manifest) -> None:
    first = build(store, manifest).columns["class"].tolist()
    file_of(store, manifest).unlink()
    assert build(store, manifest).columns["class"].tolist() == first


def test_same_rows_in_another_order_are_the_same_data(store: LocalStore, tmp_path: Path) -> None:
    other = LocalStore(str(tmp_path / "other"))
    order = np.random.default_rng(1).permutation(ROWS)
    shuffled = {name: array[order] for name, array in COLUMNS.items()}
    one, two = write_dataset(store, COLUMNS, 3, None), write_dataset(other, shuffled, 3, None)
    assert one == two
    for index in range(3):
        a, b = build(store, one, "train", index), build(other, two, "train", index)
        np.testing.assert_array_equal(a.columns["weight"], b.columns["weight"])


def test_other_seed_content_or_count_is_other_data(store: LocalStore) -> None:
    changed = {**COLUMNS, "class": COLUMNS["class"] + (np.arange(ROWS) == 5)}
    made = [
        write_dataset(store, COLUMNS, 3, None, seed=0),
        write_dataset(store, COLUMNS, 3, None, seed=1),
        write_dataset(store, COLUMNS, 2, None, seed=0),
        write_dataset(store, COLUMNS, 3, 0.5, seed=0),
        write_dataset(store, changed, 3, None, seed=0),
    ]
    assert len({manifest.fingerprint for manifest in made}) == len(made)
    labels = [build(store, manifest).columns["class"].tolist() for manifest in made[:2]]
    assert labels[0] != labels[1]


def test_lost_row_is_seen_in_the_footers(store: LocalStore, manifest: Manifest) -> None:
    rewrite(file_of(store, manifest), lambda table: table.slice(1))
    rows = manifest.rows("train", 0)
    with pytest.raises(DataError, match=rf"train partition 0 .*count {rows - 1} rows.*{rows}"):
        build(store, manifest)
    assert os.listdir(Path(store.prefix, "c", manifest.fingerprint)) == []


def test_lost_row_hidden_by_a_repeated_one_is_seen(store: LocalStore, manifest: Manifest) -> None:
    def hide(table: pa.Table) -> pa.Table:
        return pa.concat_tables([table.slice(0, 5), table.slice(4, 1), table.slice(6)])

    rewrite(file_of(store, manifest), hide)
    with pytest.raises(DataError, match="lost, repeated or exchanged"):
        build(store, manifest)


def test_rows_of_another_partition_are_seen(store: LocalStore, manifest: Manifest) -> None:
    one, other = file_of(store, manifest, "val", 0), file_of(store, manifest, "val", 1)
    assert manifest.rows("val", 0) == manifest.rows("val", 1)
    one.write_bytes(other.read_bytes())
    with pytest.raises(DataError, match=r"val partition 0 .*checksum"):
        build(store, manifest, "val", 0)


def test_rows_in_another_order_are_seen(store: LocalStore, manifest: Manifest) -> None:
    rewrite(file_of(store, manifest), lambda table: table.take(list(range(len(table)))[::-1]))
    with pytest.raises(DataError, match="not ascending after row 0"):
        build(store, manifest)


def test_truncated_file_is_named(store: LocalStore, manifest: Manifest) -> None:
    file = file_of(store, manifest)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=f"{file.name}.*not a whole Parquet file"):
        build(store, manifest)


def test_file_damaged_in_the_middle_is_named(store: LocalStore, manifest: Manifest) -> None:
    file = file_of(store, manifest)
    content = bytearray(file.read_bytes())
    content[4:2000] = b"\xff" * 1996
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"can't read .*partition=00000"):
        build(store, manifest)


def test_column_of_another_type_is_named(store: LocalStore, manifest: Manifest) -> None:
    def narrowed(table: pa.Table) -> pa.Table:
        return table.set_column(
            table.schema.get_field_index("column_001"),
            "column_001",
            table["column_001"].cast("int32"),
        )

    rewrite(file_of(store, manifest), narrowed)
    with pytest.raises(DataError, match=r"'class' holds int32.*int64"):
        build(store, manifest)


def test_folder_with_a_pickled_schema_is_refused(store: LocalStore, manifest: Manifest) -> None:
    file_of(store, manifest).with_name("_common_metadata").write_bytes(b"")
    with pytest.raises(DataError, match="unpickle"):
        build(store, manifest)


def test_damaged_cache_is_named(store: LocalStore, manifest: Manifest) -> None:
    build(store, manifest)
    array = Path(store.prefix, "c", manifest.fingerprint, "train-00000", "column_000.npy")
    array.write_bytes(array.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"column_000\.npy.*delete its folder"):
        build(store, manifest)


BUILDER = """
import json, sys
from cerebro_hydra.data.cache import CachedPartition
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.storage import LocalStore
import cerebro_hydra.data.reader
manifest = Manifest.from_json(json.loads(sys.stdin.readline()))
print("ready", flush=True)
sys.stdin.readline()
store, folder = LocalStore(sys.argv[1]), sys.argv[2]
part = CachedPartition.build(manifest.partition("train", 0), manifest, store, folder)
print(json.dumps(part.columns["class"].tolist()))
"""


def test_processes_that_build_the_same_cache_agree(store: LocalStore, manifest: Manifest) -> None:
    command = [sys.executable, "-c", BUILDER, store.prefix]
    builders = [
        subprocess.Popen(
            [*command, os.path.join(store.prefix, "raced")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(2)
    ]
    for builder in builders:
        builder.stdin.write(json.dumps(manifest.to_json()) + "\n")
        builder.stdin.flush()
    for builder in builders:
        assert builder.stdout.readline() == "ready\n"
    for builder in builders:
        builder.stdin.write("go\n")
        builder.stdin.flush()
    seen = [json.loads(builder.communicate()[0]) for builder in builders]
    assert seen == [build(store, manifest).columns["class"].tolist()] * 2
    assert os.listdir(Path(store.prefix, "raced", manifest.fingerprint)) == ["train-00000"]


def test_reading_is_silent_about_petastorms_age(store: LocalStore, manifest: Manifest) -> None:
    folder = str(file_of(store, manifest).parent)
    with warnings.catch_warnings(record=True) as seen:
        groups = list(read_columns(folder, [ROW_ID]))
    assert [str(warning.message) for warning in seen] == []
    assert len(groups) > 1
    assert sum(len(group[ROW_ID]) for group in groups) == manifest.rows("train", 0)


def test_prepared_data_is_reused_and_its_files_are_checked(
    store: LocalStore, manifest: Manifest
) -> None:
    file = file_of(store, manifest)
    written = file.stat().st_mtime_ns
    assert write_dataset(store, COLUMNS, 3, 0.25) == manifest
    assert file.stat().st_mtime_ns == written
    rewrite(file, lambda table: table.slice(1))
    with pytest.raises(StoreError, match=r"doesn't match its manifest.*prepare the data again"):
        write_dataset(store, COLUMNS, 3, 0.25)


def test_half_written_data_is_written_again(store: LocalStore, manifest: Manifest) -> None:
    folder = Path(store.data_path(manifest.fingerprint))
    (folder / "manifest.json").unlink()
    file_of(store, manifest).with_name("left-over.parquet").write_bytes(b"half")
    assert write_dataset(store, COLUMNS, 3, 0.25) == manifest
    assert build(store, manifest).rows == manifest.rows("train", 0)
    assert not list(folder.rglob("left-over.parquet"))
