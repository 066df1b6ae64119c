from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.processes import run_python, start_python
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


def one_value_changed(table: pa.Table, number: int) -> pa.Table:
    """The table with the lowest bit of one value of a column flipped."""
    column = stored_name(number)
    old = table[column].combine_chunks()
    flat = old.flatten() if pa.types.is_list(old.type) else old
    values = flat.to_numpy(zero_copy_only=False).copy()
    values.view(np.uint8)[values.nbytes // 2] ^= 1
    changed = pa.array(values, flat.type)
    if pa.types.is_list(old.type):
        changed = pa.ListArray.from_arrays(old.offsets, changed)
    return with_column(table, column, changed)


def exchanged(table: pa.Table) -> pa.Table:
    values = table["column_004"].to_numpy().copy()
    values[[3, 700]] = values[[700, 3]]
    return with_column(table, "column_004", pa.array(values))


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def rewriting(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    return lambda file: pq.write_table(change(pq.read_table(file, partitioning=None)), file)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a row is lost": (rewriting(lambda t: t.slice(1)), r"train partition 0 .*count \d+ rows"),
    "a row is lost and another repeated": (
        rewriting(lambda t: pa.concat_tables([t.slice(0, 5), t.slice(4, 1), t.slice(6)])),
        "lost, repeated or exchanged",
    ),
    "rows are in another order": (
        rewriting(lambda t: t.take(list(range(len(t)))[::-1])),
        "not ascending after row 0",
    ),
    "a column is narrower": (
        rewriting(lambda t: with_column(t, "column_001", t["column_001"].cast("int32"))),
        r"'class' holds int32.*int64",
    ),
    "two values are exchanged": (rewriting(exchanged), "column 'weight' has other values"),
    **{
        f"a value of {name} is changed": (
            rewriting(lambda table, number=number: one_value_changed(table, number)),  # type: ignore[misc]
            rf"train partition 0 .*partition=00000.*column '{name}' has other values.*prepare",
        )
        for number, name in enumerate(COLUMNS)
    },
}


@pytest.mark.parametrize("harm", HARMS)
def test_rows_that_were_harmed_are_seen_and_cost_no_other_partition(
    store: LocalStore, manifest: Manifest, harm: str
) -> None:
    change, said = HARMS[harm]
    change(file_of(store, manifest))
    with pytest.raises(DataError, match=said):
        build(store, manifest)
    cache = Path(store.prefix, "c", manifest.fingerprint)
    assert not cache.exists() or os.listdir(cache) == []
    assert build(store, manifest, "train", 1).rows == manifest.rows("train", 1)


def test_rows_of_another_partition_are_seen(store: LocalStore, manifest: Manifest) -> None:
    one, other = file_of(store, manifest, "val", 0), file_of(store, manifest, "val", 1)
    assert manifest.rows("val", 0) == manifest.rows("val", 1)
    one.write_bytes(other.read_bytes())
    with pytest.raises(DataError, match=r"val partition 0 .*checksum"):
        build(store, manifest, "val", 0)


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


def change_digests(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        digests = json.loads((folder / "digests.json").read_text())
        change(digests)
        (folder / "digests.json").write_text(json.dumps(digests))

    return rewrite


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda folder: flip(folder / "column_000.npy"),
    "a cut file": lambda folder: os.truncate(folder / "column_000.npy", 1000),
    "an empty file": lambda folder: os.truncate(folder / "column_000.npy", 0),
    "a lost file": lambda folder: (folder / "column_003.npy").unlink(),
    "lost digests": lambda folder: (folder / "digests.json").unlink(),
    "no digests": lambda folder: (folder / "digests.json").write_text("[]"),
    "deep digests": lambda folder: (folder / "digests.json").write_text("[" * 100_000),
    "digests of another partition": change_digests(
        lambda digests: digests["partition"].update(index=digests["partition"]["index"] + 1)
    ),
    "a lost folder": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_cache_that_was_damaged_or_deleted_is_decoded_again(
    store: LocalStore, manifest: Manifest, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = build(store, manifest)
    seen = {name: column.copy() for name, column in first.columns.items()}
    folder = Path(store.prefix, "c", manifest.fingerprint, "train-00000")
    held = {path: path.read_bytes() for path in folder.iterdir()}
    DAMAGES[damage](folder)
    left = {path: path.read_bytes() for path in folder.glob("*")}
    assert left != held
    again = build(store, manifest)
    for name, column in again.columns.items():
        np.testing.assert_array_equal(column, seen[name])
    assert {path: path.read_bytes() for path in folder.iterdir()} == held
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (damage != "a lost folder")
    assert all("train-00000' is damaged" in line and "decoded again" in line for line in told)


def test_open_maps_outlive_their_folder(store: LocalStore, manifest: Manifest) -> None:
    part = build(store, manifest)
    seen = part.columns["class"].tolist()
    shutil.rmtree(Path(store.prefix, "c"))
    assert part.columns["class"].tolist() == seen
    assert build(store, manifest).columns["class"].tolist() == seen


BUILDER = """
import json, os, sys, traceback
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.storage import LocalStore
import cerebro_hydra.data.reader
manifest = Manifest.from_json(json.loads(sys.stdin.readline()))
print("ready", flush=True)
sys.stdin.readline()
store, folder = LocalStore(sys.argv[1]), sys.argv[2]
try:
    part = CachedPartition.build(manifest.partition("train", 0), manifest, store, folder)
except Exception:
    traceback.print_exc()
    os._exit(1)  # threads of Arrow that still read would end the interpreter's end by a signal
print(json.dumps(part.columns["class"].tolist()))
"""


def test_processes_that_build_the_same_cache_agree(store: LocalStore, manifest: Manifest) -> None:
    raced = Path(store.prefix, "raced")
    builders = [start_python("-c", BUILDER, store.prefix, raced) for _ in range(2)]
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
    assert os.listdir(raced / manifest.fingerprint) == ["train-00000"]


def test_full_scratch_disk_is_named(store: LocalStore, manifest: Manifest, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    if not (around := on_small_disk(scratch, 20 << 10)):
        pytest.skip("no disk of its own can be mounted: that needs root, or namespaces of users")
    command, given = ("-c", BUILDER, store.prefix, scratch), json.dumps(manifest.to_json())
    done = run_python(*command, around=around, given=f"{given}\ngo\n", code=1)
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
    rewriting(lambda table: table.slice(1))(file)
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
