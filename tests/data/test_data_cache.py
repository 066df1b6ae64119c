from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cerebro_hydra.data.manifest import ROW_ID, Manifest, stored_name
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.reader import read_columns
from cerebro_hydra.errors import DataError, StoreError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.datasets import write_dataset
from tests.small_disk import on_small_disk

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


def one_value_changed(table: pa.Table, column: str) -> pa.Table:
    """The table with the lowest bit of one value of a column flipped."""
    position = table.schema.get_field_index(column)
    old = table[column].combine_chunks()
    flat = old.flatten() if pa.types.is_list(old.type) else old
    values = flat.to_numpy(zero_copy_only=False).copy()
    values.view(np.uint8)[values.nbytes // 2] ^= 1
    changed = pa.array(values, flat.type)
    if pa.types.is_list(old.type):
        changed = pa.ListArray.from_arrays(old.offsets, changed)
    return table.set_column(position, column, changed)


@pytest.mark.parametrize("position", range(len(COLUMNS)))
def test_one_changed_value_is_seen(store: LocalStore, manifest: Manifest, position: int) -> None:
    rewrite(file_of(store, manifest), lambda t: one_value_changed(t, stored_name(position)))
    name = manifest.columns[position].name
    said = rf"train partition 0 .*partition=00000.*column '{name}' has other values.*prepare"
    with pytest.raises(DataError, match=said):
        build(store, manifest)
    assert os.listdir(Path(store.prefix, "c", manifest.fingerprint)) == []
    assert build(store, manifest, "train", 1).rows == manifest.rows("train", 1)


@pytest.mark.parametrize(("old", "new"), [(2.5, -2.5), (0.0, -0.0)])
def test_one_flipped_bit_in_a_page_is_seen(store: LocalStore, old: float, new: float) -> None:
    """In the file itself, whose footer and length stay as they were."""
    weights = np.linspace(10, 11, 90, dtype=np.float32)
    weights[40] = old
    manifest = write_dataset(store, {"weight": weights}, 1, None)
    file = file_of(store, manifest)
    pq.write_table(
        pq.read_table(file, partitioning=None), file, compression="none", use_dictionary=False
    )
    assert build(store, manifest).rows == 90
    content = file.read_bytes()
    stored = pq.read_table(file, partitioning=None)["column_000"].to_numpy()
    place = content.index(stored.tobytes()) + 4 * int(np.flatnonzero(stored == old)[0])
    flipped = content[:place] + np.float32(new).tobytes() + content[place + 4 :]
    assert np.unpackbits(np.frombuffer(content, "u1") ^ np.frombuffer(flipped, "u1")).sum() == 1
    file.write_bytes(flipped)
    with pytest.raises(DataError, match="column 'weight' has other values"):
        build(store, manifest, cache="other")


def test_exchanged_values_are_seen(store: LocalStore, manifest: Manifest) -> None:
    def exchange(table: pa.Table) -> pa.Table:
        values = table["column_004"].to_numpy().copy()
        values[[3, 700]] = values[[700, 3]]
        return table.set_column(
            table.schema.get_field_index("column_004"), "column_004", pa.array(values)
        )

    rewrite(file_of(store, manifest), exchange)
    with pytest.raises(DataError, match="column 'weight' has other values"):
        build(store, manifest)


def flip(folder: Path) -> None:
    content = bytearray((folder / "column_000.npy").read_bytes())
    content[-5] ^= 1
    (folder / "column_000.npy").write_bytes(content)


def cut(folder: Path) -> None:
    array = folder / "column_000.npy"
    array.write_bytes(array.read_bytes()[:1000])


def empty(folder: Path) -> None:
    (folder / "column_000.npy").write_bytes(b"")


def lose(folder: Path) -> None:
    (folder / "column_003.npy").unlink()


def lose_digests(folder: Path) -> None:
    (folder / "digests.json").unlink()


def forget_digests(folder: Path) -> None:
    (folder / "digests.json").write_text("[]")


def exchange_partitions(folder: Path) -> None:
    """Put a whole cache with the digests that it was written with in the place of another."""
    digests = json.loads((folder / "digests.json").read_text())
    digests["partition"]["index"] += 1
    (folder / "digests.json").write_text(json.dumps(digests))


def nest_digests(folder: Path) -> None:
    (folder / "digests.json").write_text("[" * 100_000)


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        cut,
        empty,
        lose,
        lose_digests,
        forget_digests,
        exchange_partitions,
        nest_digests,
        shutil.rmtree,
    ],
)
def test_cache_that_was_damaged_or_deleted_is_decoded_again(
    store: LocalStore,
    manifest: Manifest,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = build(store, manifest)
    seen = {name: column.copy() for name, column in first.columns.items()}
    folder = Path(store.prefix, "c", manifest.fingerprint, "train-00000")
    held = {path: path.read_bytes() for path in folder.iterdir()}
    damage(folder)
    again = build(store, manifest)
    for name, column in again.columns.items():
        np.testing.assert_array_equal(column, seen[name])
    assert {path: path.read_bytes() for path in folder.iterdir()} == held
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (damage is not shutil.rmtree)
    assert all("train-00000' is damaged" in line and "decoded again" in line for line in told)


def test_open_maps_outlive_their_folder(store: LocalStore, manifest: Manifest) -> None:
    part = build(store, manifest)
    seen = part.columns["class"].tolist()
    shutil.rmtree(Path(store.prefix, "c"))
    assert part.columns["class"].tolist() == seen
    assert build(store, manifest).columns["class"].tolist() == seen


BUILDER = """
import json, sys
from cerebro_hydra.data.partition import CachedPartition
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


def test_full_scratch_disk_is_named(store: LocalStore, manifest: Manifest, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    if not (around := on_small_disk(scratch, 20 << 10)):
        pytest.skip("no disk of its own can be mounted: that needs root, or namespaces of users")
    done = subprocess.run(
        [*around, sys.executable, "-c", BUILDER, store.prefix, str(scratch)],
        input=json.dumps(manifest.to_json()) + "\ngo\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 1, "it was ended by a signal"
    assert "StoreError: can't decode rows into the scratch folder" in done.stderr
    assert f"'{scratch}': [Errno 28] No space left on device; free space there" in done.stderr


def test_scratch_that_can_not_be_written_is_named(store: LocalStore, manifest: Manifest) -> None:
    scratch = file_of(store, manifest)
    with pytest.raises(StoreError, match=rf"the scratch folder '.*{scratch.name}': .*TMPDIR"):
        build(store, manifest, cache=str(scratch))


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
    again = write_dataset(store, COLUMNS, 3, 0.25)
    assert again == manifest
    assert build(store, again).rows == manifest.rows("train", 0)
    assert not list(folder.rglob("left-over.parquet"))
    assert len(os.listdir(folder)) == 2  # the manifest, and what it names
