from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.data.manifest import ColumnSpec, Manifest, PartitionInfo, partition_path
from cerebro_hydra.data.preparation.prepared import find_prepared, read_manifest
from cerebro_hydra.errors import DataError, StoreError
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.digest import encode_document
from tests.golden import assert_golden, refusal

FINGERPRINT = "ab12" * 8


def place(split: str, index: int) -> str:
    return f"attempt-1/{partition_path(split, index)}"


MANIFEST = Manifest(
    fingerprint=FINGERPRINT,
    columns=(ColumnSpec("image", "float32", (8, 8)), ColumnSpec("label", "int64", ())),
    partitions=(
        PartitionInfo("train", 0, 10, 2**64 - 1, place("train", 0), digests=(1, 2)),
        PartitionInfo("train", 1, 9, 2**53 + 1, place("train", 1), digests=(0, 2**64 - 1)),
        PartitionInfo("val", 0, 3, 0, place("val", 0), digests=(3, 4)),
        PartitionInfo("val", 1, 2, 7, place("val", 1), digests=(5, 2**53 + 1)),
    ),
)


def test_manifest_survives_a_trip_through_json() -> None:
    assert Manifest.from_json(json.loads(json.dumps(MANIFEST.to_json()))) == MANIFEST


def test_manifest_answers_for_its_partitions() -> None:
    assert MANIFEST.num_partitions == 2
    assert MANIFEST.has_validation
    assert MANIFEST.rows("train", 1) == 9
    assert MANIFEST.partition("val", 1).path == "attempt-1/split=val/partition=00001"


def test_unknown_partition_is_named_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"train/2.*train/0"):
        MANIFEST.rows("train", 2)


PATHS = ("a/../split=train/partition=00000", "split=train", "/tmp", "a/b")
DAMAGES: dict[str, Callable[[Any], object]] = {
    "no fingerprint": lambda document: document.pop("fingerprint"),
    "no columns": lambda document: document.pop("columns"),
    "no partitions": lambda document: document.pop("partitions"),
    "a digest less": lambda document: document["partitions"][2]["digests"].pop(),
    "another format": lambda document: document.update(format=99),
}


def test_damaged_manifest_is_refused() -> None:
    found = {}
    for what, damage in DAMAGES.items():
        document = json.loads(json.dumps(MANIFEST.to_json()))
        damage(document)
        found[what] = refusal(partial(Manifest.from_json, document))
    for path in PATHS:
        document = json.loads(json.dumps(MANIFEST.to_json()))
        document["partitions"][0]["path"] = path
        found[f"path {path}"] = refusal(partial(Manifest.from_json, document))
    assert_golden(Path(__file__).with_name("golden") / "refused_manifests.txt", found)


@pytest.mark.parametrize("document", [[], None, 3, "x"])
def test_json_that_is_no_manifest_is_refused_with_its_file(
    document: object, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path)
    path = f"{store.data_path(FINGERPRINT)}/manifest.json"
    store.write(path, json.dumps(document).encode())
    with pytest.raises(StoreError, match=f"{path}' is damaged.*or delete .* and prepare again"):
        find_prepared(store, FINGERPRINT)
    with pytest.raises(StoreError, match="the manifest is no dictionary"):
        Manifest.from_json(document)


def test_one_flipped_bit_of_a_manifest_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    path = Path(store.data_path(FINGERPRINT), "manifest.json")
    store.write(str(path), encode_document(MANIFEST.to_json()))
    assert read_manifest(store, FINGERPRINT) == MANIFEST
    content = path.read_bytes()
    for name in (b"image", b"label"):
        path.write_bytes(content.replace(name, name[:-1] + bytes([name[-1] ^ 1])))
        with pytest.raises(StoreError, match=f"{path}' is damaged"):
            read_manifest(store, FINGERPRINT)
