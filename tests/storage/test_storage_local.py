from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.storage import LocalStore, Store
from cerebro_hydra.testing.stores import StoreCase


class TestLocalStore(StoreCase):
    def make_store(self, tmp_path: Path) -> Store:
        return LocalStore(str(tmp_path / "a store"))


def test_prefix_below_a_file_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"file/store.*choose another folder"):
        LocalStore(str(tmp_path / "file" / "store"))


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write everywhere, so for a while it is nobody."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_unwritable_prefix_is_refused_with_a_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with unprivileged(), pytest.raises(StoreError, match="may write"):
        LocalStore(str(tmp_path / "store"))


def test_folders_that_others_made_and_keep_are_refused() -> None:
    # Below pytest's own folder nobody but root sees anything.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        LocalStore(folder)
        os.chmod(os.path.join(folder, "data"), 0o555)
        with (
            unprivileged(),
            pytest.raises(StoreError, match=r"can't write to '.*/data'.*may write"),
        ):
            LocalStore(folder)


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "s", tmp_path / "t", tmp_path / "v")
    assert (
        store.to_dict() == LocalStore(f"{tmp_path}/s", f"{tmp_path}/t", f"{tmp_path}/v").to_dict()
    )


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (None, "prefix_path is None; give the path"),
        ("", "prefix_path is ''; give the path"),
        (b"/tmp", "prefix_path is b'/tmp'; give"),
        ("hdfs://node:9000/x", "'hdfs://node:9000/x'; a LocalStore takes a path of a file system"),
        ("s3://bucket/x", "'s3://bucket/x'; a LocalStore takes .* such as a mounted share"),
        (Path("s3://bucket/x"), "a LocalStore takes a path of a file system"),
        ("S3A://bucket/x", "a LocalStore takes a path of a file system"),
        ("file://other-machine/x", "a LocalStore takes a path of a file system"),
        ("dbfs:/x", "'dbfs:/x'; a LocalStore takes .*dbfs:/x is mounted as /dbfs/x"),
    ],
)
def test_what_is_no_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=said):
        LocalStore(prefix)
    if prefix:
        said = said.replace("prefix_path is ", "train_path is ")
        with pytest.raises(ConfigurationError, match=said):
            LocalStore(tmp_path / "store", train_path=prefix)
    assert set(os.listdir(tmp_path)) <= {"store"}


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_a_file_url_is_the_path_that_it_names(tmp_path: Path, scheme: str) -> None:
    assert LocalStore(f"{scheme}{tmp_path}/a: b").prefix == f"{tmp_path}/a: b"


def test_prefix_that_reads_as_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="'#'"):
        LocalStore(str(tmp_path / "run#1"))


def test_write_below_a_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.write(f"{store.run_path('r')}/file", b"x")
    with pytest.raises(StoreError, match="can't write"):
        store.write(f"{store.run_path('r')}/file/below", b"y")
    assert os.listdir(store.run_path("r")) == ["file"]


def test_write_over_a_folder_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.write(f"{store.run_path('r')}/folder/file", b"x")
    with pytest.raises(StoreError, match="folder"):
        store.write(f"{store.run_path('r')}/folder", b"y")
    assert os.listdir(store.run_path("r")) == ["folder"]


def test_unfinished_write_of_a_crashed_process_is_not_listed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    store.write(f"{store.run_path('r')}/file", b"x")
    Path(store.run_path("r"), f".unfinished-{'01' * 16}").write_bytes(b"half")
    assert store.list(store.run_path("r")) == ["file"]
    store.delete_unfinished(store.prefix)
    assert os.listdir(store.run_path("r")) == ["file"]


def test_existing_store_is_opened_without_creating_anything(tmp_path: Path) -> None:
    LocalStore.existing(str(tmp_path))
    assert os.listdir(tmp_path) == []
    with pytest.raises(StoreError, match="no store at"):
        LocalStore.existing(str(tmp_path / "absent"))
