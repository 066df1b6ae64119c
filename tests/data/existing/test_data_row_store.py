"""petastorm's row stores, and Cerebro's, which are such stores."""

from __future__ import annotations

import shutil
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from cerebro_hydra.data.manifest import Codec
from cerebro_hydra.data.preparation.existing import existing_paths, metadata_from
from cerebro_hydra.data.row_store import decode
from cerebro_hydra.errors import ConfigurationError, DataError, SetupError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.testing.datasets import write_dataset
from tests.data.existing.existing_stores import (
    CEREBRO_STORE,
    describe,
    joined,
    read_all,
    write_row_store,
)

pytest.importorskip("petastorm")
from petastorm import make_reader
from petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec, ScalarCodec
from petastorm.unischema import Unischema, UnischemaField

ROWS = 60
NUMBERS = np.random.default_rng(1)
# Of each column the type in numpy, its shape, codec, and type in the files.
KINDS: dict[str, tuple[Any, tuple[int | None, ...], Any, pa.DataType]] = {
    "id": (np.int32, (), ScalarCodec(T.IntegerType()), pa.int32()),
    "small": (np.uint8, (), None, pa.int16()),
    "price": (Decimal, (), ScalarCodec(T.DecimalType(9, 2)), pa.decimal128(9, 2)),
    "ok": (np.bool_, (), ScalarCodec(T.BooleanType()), pa.bool_()),
    "wide": (np.float64, (), ScalarCodec(T.DoubleType()), pa.float64()),
    "matrix": (np.float64, (None, 3), NdarrayCodec(), pa.binary()),
    "mask": (np.bool_, (4,), CompressedNdarrayCodec(), pa.binary()),
    "text": (np.str_, (), ScalarCodec(T.StringType()), pa.string()),
}
NUMERIC = ["matrix", "mask", "id", "small", "price", "ok", "wide"]


def make_rows(*changes: tuple[int, str, Any]) -> list[dict[str, Any]]:
    """Rows, some of whose cells hold another value."""
    rows: list[dict[str, Any]] = [
        {
            **{"id": np.int32(i), "small": np.uint8(255 - i), "price": Decimal(i) / 4},
            **{"ok": np.bool_(i % 3 == 0), "wide": np.float64(i / 7), "text": f"row {i}"},
            "matrix": NUMBERS.normal(size=(2, 3)),
            "mask": NUMBERS.integers(0, 2, 4).astype(np.bool_),
        }
        for i in range(ROWS)
    ]
    for row, column, value in changes:
        rows[row][column] = value
    return rows


def write(root: Path, rows: list[dict[str, Any]], **images: UnischemaField) -> Path:
    fields = [UnischemaField(name, *kind[:3], False) for name, kind in KINDS.items()]
    types = {name: kind[3] for name, kind in KINDS.items()} | dict.fromkeys(images, pa.binary())
    return write_row_store(root, Unischema("rows", [*fields, *images.values()]), rows, types)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("petastorm") / "rows", make_rows())


@pytest.mark.parametrize("parts", [1, 4])
def test_petastorms_own_reader_gives_the_same_rows(tmp_path: Path, root: Path, parts: int) -> None:
    with make_reader(f"file://{root}", reader_pool_type="dummy", num_epochs=1) as reader:
        peer = {int(row.id): row._asdict() for row in reader}
    assert len(peer) == ROWS
    store = LocalStore(str(tmp_path / "store"), str(root))
    manifest = describe(store, NUMERIC, parts, None)
    dtypes = {spec.name: (spec.dtype, spec.shape) for spec in manifest.columns}
    assert (dtypes["matrix"], dtypes["mask"]) == (("float32", (2, 3)), ("bool", (4,)))
    assert (dtypes["small"], dtypes["price"]) == (("int64", ()), ("float32", ()))
    read = read_all(store, manifest, "train", tmp_path / "cache")
    assert joined(read, "id").tolist() == sorted(peer)
    for name in NUMERIC:
        kind = dtypes[name][0]
        expected = np.stack([np.asarray(peer[i][name]).astype(kind) for i in sorted(peer)])
        np.testing.assert_array_equal(joined(read, name), expected)


def test_share_is_held_back_of_decoded_rows(tmp_path: Path, root: Path) -> None:
    store = LocalStore(str(tmp_path / "store"), str(root))
    manifest = describe(store, ["matrix", "id"], 3, 0.3)
    parts = [read_all(store, manifest, split, tmp_path / "c") for split in ("train", "val")]
    ids = [joined(each, "id").tolist() for each in parts]
    assert (len(ids[0]), len(ids[1])) == (42, 18)
    assert sorted(ids[0] + ids[1]) == list(range(ROWS))


def test_the_schema_is_not_unpickled_after_it_was_described(tmp_path: Path, root: Path) -> None:
    """An agent or a replay decodes by the manifest, so a run folder can't bring a pickle along."""
    copy = tmp_path / "rows"
    shutil.copytree(root, copy)
    store = LocalStore(str(tmp_path / "store"), str(copy))
    manifest = describe(store, ["matrix"], 2, None)
    (copy / "_common_metadata").unlink()
    read = read_all(store, manifest, "train", tmp_path / "cache")
    assert joined(read, "matrix").shape == (ROWS, 2, 3)


def test_images(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2", reason="petastorm needs OpenCV for images")
    assert cv2
    field = UnischemaField("image", np.uint8, (5, None, 3), CompressedImageCodec("png"), False)
    images = NUMBERS.integers(0, 256, (ROWS, 5, 6, 3)).astype(np.uint8)
    rows = [{**row, "image": image} for row, image in zip(make_rows(), images, strict=True)]
    root = write(tmp_path / "rows", rows, image=field)
    store = LocalStore(str(tmp_path / "store"), str(root))
    read = read_all(store, describe(store, ["image"], 2, None), "train", tmp_path / "cache")
    np.testing.assert_array_equal(joined(read, "image"), images)


def test_images_without_opencv_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petastorm.codecs.OPENCV_AVAILABLE", False)
    with pytest.raises(SetupError, match="install opencv-python-headless"):
        decode(pa.array([b"x"]), Codec("image", "uint8"), "int64")


@pytest.mark.parametrize(
    ("row", "value", "said"),
    [
        (
            41,
            np.full((2, 3), np.nan),
            r"NaN, infinity.* in 1 of 60 rows, as in row 1 of .*part-00003",
        ),
        (42, np.ones((4, 3)), r"from 2 to 4 in dimension 0; one of 2 is in row 0 of .*part-00000"),
    ],
)
def test_cells_that_cant_be_trained_on(tmp_path: Path, row: int, value: Any, said: str) -> None:
    root = write(tmp_path / "rows", make_rows((row, "matrix", value)))
    with pytest.raises(DataError, match=said):
        describe(LocalStore(str(tmp_path / "s"), str(root)), ["matrix"], 2, None)


def test_nulls_and_cells_that_cant_be_decoded(tmp_path: Path) -> None:
    def cell(value: Any) -> bytes:
        field = UnischemaField("x", value.dtype.type, value.shape)
        return bytes(NdarrayCodec().encode(field, value))

    good = cell(np.ones(2))
    cells = [good, None, b"\x93NUMPY", cell(np.ones((1, 2))), cell(np.ones(2, np.int64)), good]
    found = decode(pa.array(cells, pa.binary()), Codec("ndarray", "float64"), "float32")
    assert {k: v.tolist() for k, v in found.faults.items()} == {
        "can't be decoded as petastorm's ndarray": [2],
        "holds arrays of other dimensions than before, or not of float64": [3, 4],
        "is null, or holds null": [1],
    }
    with pytest.raises(DataError, match=r"'x' can't be decoded .* in row 2: fill or drop"):
        found.array("x", "row {}".format)


def test_text_and_absent_columns(tmp_path: Path, root: Path) -> None:
    store = LocalStore(str(tmp_path / "s"), str(root))
    with pytest.raises(DataError, match=r"'text' is str in petastorm's schema.*StringIndexer"):
        describe(store, ["text"], 2, None)
    with pytest.raises(DataError, match=r"'matrx' is not in .*did you mean 'matrix'"):
        describe(store, ["matrx"], 2, None)


def test_without_petastorm_it_is_refused_with_a_sentence(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "petastorm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "petastorm", None)
    with pytest.raises(SetupError, match=r"petastorm row store.*plain Parquet"):
        describe(LocalStore(str(tmp_path / "s"), str(root)), ["matrix"], 2, None)


@pytest.fixture
def cerebro(tmp_path: Path) -> Path:
    shutil.copytree(CEREBRO_STORE, tmp_path / "cerebro")
    return tmp_path / "cerebro"


@pytest.mark.parametrize("by_prefix", [True, False])
def test_what_cerebro_prepared(tmp_path: Path, cerebro: Path, by_prefix: bool) -> None:
    if by_prefix:
        store = LocalStore(str(cerebro))
    else:
        store = LocalStore(str(tmp_path / "s"), f"{cerebro}/train_data", f"{cerebro}/val_data")
    manifest = describe(store, ["features", "pair", "label", "weight"], 2, 0.2)
    found = {spec.name: (spec.dtype, spec.shape) for spec in manifest.columns}
    assert found["features"] == ("float32", (4,))
    assert found["label"] == ("int64", ())
    train, val = (read_all(store, manifest, s, tmp_path / "c") for s in ("train", "val"))
    weights = [sorted(joined(parts, "weight").tolist()) for parts in (train, val)]
    assert weights == [[float(i) for i in range(60) if i % 10 != 9], [9.0, 19, 29, 39, 49, 59]]
    weight = joined(train, "weight")
    np.testing.assert_array_equal(joined(train, "pair"), np.stack([weight, weight / 2], axis=1))
    np.testing.assert_array_equal(joined(train, "label"), weight.astype(int) % 3)
    assert metadata_from(store, ["features"])[:2] == (54, 6)


def test_cerebros_data_beside_prepared_data_must_be_named(cerebro: Path) -> None:
    store = LocalStore(str(cerebro))
    describe(store, ["features"], 2, None)
    assert existing_paths(store) is not None
    write_dataset(store, {"x": np.ones(9)}, 2, None)
    with pytest.raises(ConfigurationError, match=r"train_path='.*train_data' for the one"):
        existing_paths(store)
    named = LocalStore(str(cerebro), str(cerebro / "train_data"))
    assert existing_paths(named) == (str(cerebro / "train_data"), None)
