"""Plain Parquet files, trained on as they lie."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.existing import metadata_from
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import ConfigurationError, DataError, StoreError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.datasets import write_dataset
from tests.data.existing.existing_stores import describe, joined, read_all, write_plain
from tests.golden import assert_golden, refusal

ROWS = 60
NUMBERS = np.random.default_rng(0)
IMAGES = NUMBERS.normal(size=(ROWS, 2, 3))
TABLE = pa.table(
    {
        "id": pa.array(range(ROWS), pa.int32()),
        "a weight": pa.array(NUMBERS.normal(size=ROWS)),
        "ok": pa.array([i % 3 == 0 for i in range(ROWS)]),
        "features": pa.array(NUMBERS.normal(size=(ROWS, 4)).tolist(), pa.list_(pa.float32())),
        "image": pa.array(IMAGES.tolist(), pa.list_(pa.list_(pa.float64()))),
        "name": pa.array([f"row {i}" for i in range(ROWS)]),
    }
)
COLUMNS = ["image", "features", "id", "ok", "a weight"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_plain(tmp_path / "some rows#1", TABLE)


def open_store(tmp_path: Path, root: Path, val: Path | None = None) -> LocalStore:
    return LocalStore(str(tmp_path / "store"), str(root), None if val is None else str(val))


@pytest.mark.parametrize("parts", [1, 7])
def test_rows_come_in_the_order_of_the_files_each_once(
    tmp_path: Path, root: Path, parts: int
) -> None:
    store = open_store(tmp_path, root)
    manifest = describe(store, COLUMNS, parts, None)
    read = read_all(store, manifest, "train", tmp_path / "cache")
    assert len(read) == parts
    assert joined(read, "id").tolist() == list(range(ROWS))
    assert max(part.rows for part in read) - min(part.rows for part in read) <= 1
    np.testing.assert_array_equal(joined(read, "image"), IMAGES.astype(np.float32))
    assert joined(read, "ok").tolist() == TABLE["ok"].to_pylist()
    found = {spec.name: (spec.dtype, spec.shape) for spec in manifest.columns}
    assert found["image"] == ("float32", (2, 3))
    assert found["id"] == ("int64", ())
    assert found["ok"] == ("bool", ())
    assert isinstance(read[0].columns["features"], np.memmap)


def test_large_row_groups_are_read_in_parts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("cerebro_hydra.data.parquet._BATCH_BYTES", 500)
    store = open_store(tmp_path, write_plain(tmp_path / "rows", TABLE, [[40, 20]]))
    read = read_all(store, describe(store, COLUMNS, 3, 0.25), "train", tmp_path)
    val = read_all(store, describe(store, COLUMNS, 3, 0.25), "val", tmp_path)
    together = np.concatenate([joined(read, "id"), joined(val, "id")])
    assert sorted(together.tolist()) == list(range(ROWS))
    for parts in (read, val):
        rows = joined(parts, "id")
        np.testing.assert_array_equal(joined(parts, "image"), IMAGES[rows].astype(np.float32))


def test_share_is_held_back_by_the_seed(tmp_path: Path, root: Path) -> None:
    store = open_store(tmp_path, root)
    held = []
    for seed in (0, 1, 0):
        manifest = describe(store, ["id"], 2, 0.2, seed)
        val = read_all(store, manifest, "val", tmp_path / "cache")
        assert [part.rows for part in val] == [6, 6]
        train = joined(read_all(store, manifest, "train", tmp_path / "cache"), "id").tolist()
        held.append(joined(val, "id").tolist())
        assert sorted(train + held[-1]) == list(range(ROWS))
    assert held[0] == held[2] != held[1]


def test_val_path_is_validated_on_whatever_the_share(tmp_path: Path, root: Path) -> None:
    val = write_plain(tmp_path / "val", TABLE.slice(0, 9), [[4], [5]])
    store = open_store(tmp_path, root, val)
    manifest = describe(store, ["id"], 2, 0.2)
    assert joined(read_all(store, manifest, "train", tmp_path), "id").tolist() == list(range(ROWS))
    assert joined(read_all(store, manifest, "val", tmp_path), "id").tolist() == list(range(9))
    without = describe(store, ["id"], 2, None)
    assert not without.has_validation
    others = manifest, without, describe(store, ["id"], 3, 0.2)
    assert len({each.fingerprint for each in others}) == 3


def test_what_is_described_is_found_again_and_survives_json(tmp_path: Path, root: Path) -> None:
    store = open_store(tmp_path, root)
    manifest = describe(store, COLUMNS, 3, 0.25, 7)
    assert find_prepared(store, manifest.fingerprint) == manifest

    def unused(*_: Any) -> Any:
        pytest.fail("the rows were read again")

    assert describe(store, COLUMNS, 3, 0.25, 7, mapper=unused) == manifest
    rebuilt = LocalStore.from_dict(store.to_dict())
    assert (rebuilt.train_path, rebuilt.val_path) == (str(root), None)


def test_a_store_with_its_rows_can_move(tmp_path: Path) -> None:
    write_plain(tmp_path / "a" / "rows", TABLE)
    store = LocalStore(str(tmp_path / "a"), str(tmp_path / "a" / "rows"))
    manifest = describe(store, ["id"], 2, None)
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = LocalStore(str(tmp_path / "b"), str(tmp_path / "b" / "rows"))
    assert describe(moved, ["id"], 2, None) == manifest
    assert joined(read_all(moved, manifest, "train", tmp_path), "id").tolist() == list(range(ROWS))


def test_one_file_of_pandas_and_nested_folders(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": np.arange(5), "v": list(np.arange(10.0).reshape(5, 2))})
    frame.to_parquet(tmp_path / "one.parquet")
    store = open_store(tmp_path, tmp_path / "one.parquet")
    (part,) = read_all(store, describe(store, ["x", "v"], 1, None), "train", tmp_path)
    assert part.columns["v"].tolist() == np.arange(10.0).reshape(5, 2).tolist()
    for day in (2, 1):
        write_plain(tmp_path / "days" / f"day={day}", TABLE.slice(day, 3), [[3]])
    days = LocalStore(f"file://{tmp_path}/store", f"file://{tmp_path}/days")
    (part,) = read_all(days, describe(days, ["id"], 1, None), "train", tmp_path)
    assert part.columns["id"].tolist() == [1, 2, 3, 2, 3, 4]
    with pytest.raises(DataError, match=r"'day' is kept in the names of folders.*into the files"):
        describe(days, ["id", "day"], 1, None)


def changed(column: str, values: list[Any], kind: pa.DataType | None = None) -> pa.Table:
    """The table with these values in rows 40 and on."""
    old = TABLE[column].to_pylist()
    new = pa.array([*old[:40], *values, *old[40 + len(values) :]], kind or TABLE[column].type)
    return TABLE.set_column(TABLE.schema.get_field_index(column), column, new)


def test_files_may_differ_in_width_and_in_where_null_may_be(tmp_path: Path) -> None:
    inner = pa.field("element", pa.float32(), nullable=False)
    types = [(pa.int32(), pa.list_(pa.float64())), (pa.int64(), pa.list_(inner))]
    for number, kinds in enumerate(types):
        values = [pa.array([number], kinds[0]), pa.array([[number, 2]], kinds[1])]
        write_plain(tmp_path / "rows" / f"{number}", pa.table(values, ["id", "x"]), [[1]])
    store = open_store(tmp_path, tmp_path / "rows")
    (part,) = read_all(store, describe(store, ["id", "x"], 1, None), "train", tmp_path)
    assert part.columns["id"].tolist() == [0, 1]
    assert part.columns["x"].tolist() == [[0, 2], [1, 2]]


def spoil(file: Path) -> None:
    """Damage a page, which the footer doesn't show."""
    content = file.read_bytes()
    file.write_bytes(content[:4] + b"\xff" * 56 + content[60:])


def other_schema(file: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.set_column(0, "id", table["id"].cast(pa.float64())), file)


FAULTS: dict[str, tuple[str, list[Any]]] = {
    "nulls": ("id", [None, None]),
    "a number that is none": ("a weight", [1.0, np.nan]),
    "a number beyond float32": ("a weight", [1e39]),
    "a null in a list": ("features", [[1.0, None, 1.0, 1.0]]),
    "a short list": ("features", [[1.0]]),
    "a short list in a list": ("image", [[[1.0] * 3] * 2, [[1.0] * 3, [1.0]]]),
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a cut file": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "a spoilt page": spoil,
    "another schema": other_schema,
    "another file": lambda file: file.with_name("notes.txt").write_text("not rows"),
    "no folder": lambda file: shutil.rmtree(file.parent),
    "no files": lambda file: [each.unlink() for each in file.parent.iterdir()],
}
ARGUMENTS: tuple[tuple[str, int, Any], ...] = (
    ("featuers", 2, None), ("name", 2, None), ("id", 61, None), ("id", 4, 0.05), ("id", 2, "ok"),
    ("id", 2, 1.5),
)  # fmt: skip


def test_files_and_arguments_that_can_not_be_trained_on_are_refused(tmp_path: Path) -> None:
    """Rows are counted and placed: row 40 is the first of the last file."""
    stores, uses = [], dict[str, Callable[[], object]]()

    def refuse(what: str, root: Path, column: str, *rest: Any) -> None:
        stores.append(LocalStore(str(tmp_path / f"store {len(stores)}"), str(root)))
        uses[what] = partial(describe, stores[-1], [column], *rest)

    for what, (column, values) in FAULTS.items():
        refuse(what, write_plain(tmp_path / what, changed(column, values)), column, 2, 0.2)
    for what, damage in DAMAGES.items():
        root = write_plain(tmp_path / what, TABLE)
        refuse(what, root, "id", 2, None)
        damage(root / "part-00003.parquet")
    for given in ARGUMENTS:
        refuse(f"arguments {given}", write_plain(tmp_path / str(given), TABLE), *given)
    refuse("no rows", write_plain(tmp_path / "empty", TABLE.slice(0, 0), [[0]]), "id", 1, None)
    uses["no train_path"] = partial(describe, LocalStore(str(tmp_path / "bare")), ["id"], 1, None)
    uses["only a val_path"] = partial(LocalStore, str(tmp_path), val_path=str(tmp_path))
    found = {what: refusal(use).replace(str(tmp_path), "TMP") for what, use in uses.items()}
    for what in ("a cut file", "a spoilt page", "another file"):  # Arrow's words follow
        found[what] = re.findall(r".*\.\w+'(?: is not a whole Parquet file)?", found[what])[0]
    assert_golden(Path(__file__).with_name("golden") / "refused_files.txt", found)
    assert all(store.list(f"{store.prefix}/data") == [] for store in stores)


def test_rows_that_are_both_trained_and_validated_on_are_refused(tmp_path: Path) -> None:
    root = write_plain(tmp_path / "rows", TABLE)
    write_plain(root / "val", TABLE)
    with pytest.raises(ConfigurationError, match=r"share 4 files.*rows/val/part-00000\.parquet"):
        describe(open_store(tmp_path, root, root / "val"), ["id"], 2, 0.2)
    (tmp_path / "same").symlink_to(root)
    with pytest.raises(ConfigurationError, match="keep them in folders apart"):
        describe(open_store(tmp_path, root, tmp_path / "same"), ["id"], 2, 0.2)
    described = describe(open_store(tmp_path, root, root / "val"), ["id"], 2, None)
    assert sum(info.rows for info in described.partitions) == 2 * ROWS


@pytest.mark.parametrize("rows", [slice(0, 19), slice(1, 21)])
def test_files_that_change_afterwards_are_seen(tmp_path: Path, root: Path, rows: slice) -> None:
    store = open_store(tmp_path, root)
    manifest = describe(store, ["id"], 2, None)
    file = root / "part-00003.parquet"
    table = pq.read_table(file)
    pq.write_table(pa.concat_tables([table, table]).slice(rows.start, rows.stop - rows.start), file)
    with pytest.raises(StoreError, match=r"part-00003.* has changed .*restore it"):
        find_prepared(store, manifest.fingerprint)
    with pytest.raises(DataError, match=r"part-00003.* has changed since a run was planned"):
        read_all(store, manifest, "train", tmp_path / "cache")
    assert describe(store, ["id"], 2, None).fingerprint != manifest.fingerprint
    file.unlink()
    with pytest.raises(StoreError, match="part-00003"):
        find_prepared(store, manifest.fingerprint)


def test_rows_that_change_under_an_equal_footer_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "rows" / "one.parquet"
    file.parent.mkdir()
    weights = pa.table({"x": np.linspace(0.5, 1.5, 9)})
    pq.write_table(weights, file, compression="none", use_dictionary=False)
    store = open_store(tmp_path, file.parent)
    manifest = describe(store, ["x"], 1, None)
    one, nan = np.float64(1.0).tobytes(), np.float64(np.nan).tobytes()
    content = file.read_bytes()
    assert content.count(one) == 1
    file.write_bytes(content.replace(one, nan))
    said = r"one\.parquet' has changed since a run was planned on it: .*'x' holds NaN.* rows 0 to 8"
    with pytest.raises(DataError, match=said):
        read_all(store, manifest, "train", tmp_path / "cache")


@pytest.mark.parametrize("position", [0, 35, 59])
def test_one_flipped_bit_under_an_equal_footer_is_seen(tmp_path: Path, position: int) -> None:
    """In either split of rows that are partly held back, and in no other partition."""
    file = tmp_path / "rows" / "one.parquet"
    file.parent.mkdir()
    weights = NUMBERS.normal(size=ROWS)
    table = pa.table({"x": weights, "id": range(ROWS)})
    pq.write_table(table, file, compression="none", use_dictionary=False, row_group_size=ROWS)
    store = open_store(tmp_path, file.parent)
    manifest = describe(store, ["x", "id"], 2, 0.3)
    rows = {
        info: CachedPartition.build(info, manifest, store, str(tmp_path / "before")).columns["id"]
        for info in manifest.partitions
    }
    content = bytearray(file.read_bytes())
    content[content.index(weights.tobytes()) + 8 * position + 7] ^= 0x80  # the sign
    file.write_bytes(content)
    assert find_prepared(store, manifest.fingerprint) == manifest  # footers show nothing
    for info in manifest.partitions:
        if position in rows[info].tolist():
            said = rf"{info.split} partition {info.index} in .*one.parquet': column 'x' has other"
            with pytest.raises(DataError, match=said + r" values.*restore the files"):
                CachedPartition.build(info, manifest, store, str(tmp_path / "after"))
        else:
            CachedPartition.build(info, manifest, store, str(tmp_path / "after"))


def test_metadata_of_existing_and_of_prepared_data(tmp_path: Path, root: Path) -> None:
    val = write_plain(tmp_path / "val", TABLE.slice(0, 9), [[9]])
    rows, val_rows, metadata, size = metadata_from(open_store(tmp_path, root, val), ["id", "image"])
    assert (rows, val_rows) == (ROWS, 9)
    assert {n: (c.dtype, c.shape) for n, c in metadata.items()} == {
        "id": ("int64", ()),
        "image": ("float32", (2, 3)),
    }
    assert 50 < size < 400
    store = LocalStore(str(tmp_path / "prepared"))
    with pytest.raises(ConfigurationError, match="holds 0 data sets"):
        metadata_from(store, ["x"])
    write_dataset(store, {"x": np.ones((50, 4)), "y": np.arange(50)}, 2, 0.2)
    found = metadata_from(store, ["x"])
    assert (found.train_rows, found.val_rows, list(found.metadata)) == (40, 10, ["x"])
    assert found.metadata["x"].shape == (4,)
    assert 4 < found.avg_row_size < 100


def delta(root: Path) -> Path:
    """Lay a log beside the files, which removes the second of them."""
    log = root / "_delta_log"
    log.mkdir()
    (log / "00000000000000000001.json").write_text('{"remove":{"path":"part-00001.parquet"}}')
    return root


def iceberg(root: Path) -> Path:
    """Move the files to where Iceberg has them, below a folder with its metadata."""
    (root / "data").mkdir()
    for path in [each for each in root.iterdir() if each.is_file()]:
        path.rename(root / "data" / path.name)
    (root / "metadata").mkdir()
    (root / "metadata" / "v1.metadata.json").write_text("{}")
    return root


def hudi(root: Path) -> Path:
    """Lay the folder beside the files that names those of each commit."""
    (root / ".hoodie").mkdir()
    return root


def streamed(root: Path) -> Path:
    """Lay the log beside the files that Spark's streams write, which names those that are whole."""
    (root / "_spark_metadata").mkdir()
    return root


def paimon(root: Path) -> Path:
    """Move the files to where Paimon has them, below a folder with what says which count."""
    (root / "bucket-0").mkdir()
    for path in [each for each in root.iterdir() if each.is_file()]:
        path.rename(root / "bucket-0" / path.name)
    for name in ("manifest/manifest-list-0", "snapshot/snapshot-1"):
        (root / name).parent.mkdir()
        (root / name).write_bytes(b"Obj")
    return root


@pytest.mark.parametrize(
    ("make", "name", "kind"),
    [
        (delta, "Delta", "delta"),
        (iceberg, "Iceberg", "iceberg"),
        (hudi, "Hudi", "hudi"),
        (streamed, "streamed", "parquet"),
        (paimon, "Paimon", "paimon"),
    ],
)
def test_a_table_whose_log_says_which_rows_count_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], name: str, kind: str
) -> None:
    root = make(write_plain(tmp_path / "tables" / "t", TABLE))
    part = next(path for path in sorted(root.rglob("*.parquet")))
    (link := tmp_path / "link").symlink_to(part.parent)
    (file_link := tmp_path / "link.parquet").symlink_to(part)
    said = rf"{name} table '{root}'.* spark\.read\.format\('{kind}'\)\.load\('{root}'\)"
    plain = write_plain(tmp_path / "plain", TABLE)
    for path in (root, root.parent, part.parent, part, link, file_link):
        for store in (open_store(tmp_path, path), open_store(tmp_path, plain, path)):
            with pytest.raises(DataError, match=f"{said}, and give that to backend.prepare_data"):
                describe(store, ["id"], 2, None if store.val_path is None else 0.2)
            with pytest.raises(DataError, match=said):
                metadata_from(store, ["id"])


@pytest.mark.parametrize(
    "folder", ["base_0000002", "delta_0000003_0000003", "delta_0000001_0000001_0000_v12"]
)
def test_what_writes_to_a_transactional_table_of_hive_have_left_is_refused(
    tmp_path: Path, folder: str
) -> None:
    write_plain(tmp_path / "t" / folder, TABLE)
    assert describe(open_store(tmp_path, tmp_path / "t"), ["id"], 2, None)  # by whoever else
    for number, path in enumerate(sorted((tmp_path / "t" / folder).glob("*.parquet"))):
        path.rename(path.with_name(f"{number:06}_0"))
    for path in (tmp_path / "t", tmp_path / "t" / folder):
        with pytest.raises(DataError, match=rf"transactional Hive table '{tmp_path}/t'.*INSERT"):
            describe(open_store(tmp_path, path), ["id"], 2, None)


def test_what_a_later_write_by_databricks_has_replaced_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "rows"
    root.mkdir()
    first, second = (root / f"part-00000-tid-{n}-c000.parquet" for n in (11, 12))

    def write(path: Path, number: int, **told: list[str]) -> None:
        (root / f"_started_{number}").touch()
        pq.write_table(TABLE, path)
        (root / f"_committed_{number}").write_text(json.dumps({"added": [path.name], **told}))

    write(first, 11, removed=[])
    (root / "_committed_vacuum13").write_text("not JSON")
    assert describe(open_store(tmp_path, root), ["id"], 2, None)
    write(second, 12, removed=[first.name])
    with pytest.raises(DataError, match=rf"'{first}', which _committed_12 removed: its rows"):
        describe(open_store(tmp_path, root), ["id"], 2, None)
    first.unlink()
    assert describe(open_store(tmp_path, root), ["id"], 2, None)
    (root / "_committed_12").unlink()
    with pytest.raises(DataError, match=rf"'{second}', which no _committed_ file names"):
        describe(open_store(tmp_path, root), ["id"], 2, None)


@pytest.mark.parametrize(
    ("target", "link", "make"),
    [
        ("part-00000.parquet", "z.parquet", os.symlink),
        ("a", "b", os.symlink),
        (".", "a/loop", os.symlink),
        ("part-00000.parquet", "a/z.parquet", os.link),
    ],
)
def test_a_file_that_a_link_makes_two_of_is_refused(
    tmp_path: Path, target: str, link: str, make: Callable[[Path, Path], None]
) -> None:
    root = write_plain(tmp_path / "rows", TABLE)
    write_plain(root / "a", TABLE)
    make(root / target, root / link)
    with pytest.raises(DataError, match=r"are one file, .* would count twice: delete the link"):
        describe(open_store(tmp_path, root), ["id"], 2, None)
    (root / link).unlink()
    assert describe(open_store(tmp_path, root), ["id"], 2, None)
