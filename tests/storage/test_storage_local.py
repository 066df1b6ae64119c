from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cerebro_hydra.errors import StoreError
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
    Path(store.run_path("r"), ".unfinished-0123").write_bytes(b"half")
    assert store.list(store.run_path("r")) == ["file"]


def test_existing_store_is_opened_without_creating_anything(tmp_path: Path) -> None:
    LocalStore.existing(str(tmp_path))
    assert os.listdir(tmp_path) == []
    with pytest.raises(StoreError, match="no store at"):
        LocalStore.existing(str(tmp_path / "absent"))
