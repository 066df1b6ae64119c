from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.storage import LocalStore, RunFolder, Store
from cerebro_hydra.storage.local_paths import only_local
from cerebro_hydra.testing.stores import StoreCase


class TestLocalStore(StoreCase):
    def make_store(self, tmp_path: Path) -> Store:
        return LocalStore(str(tmp_path / "a store"))


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
        ("{tmp}/run#1", "'#'"),
        ("{tmp}/a\nb", r"prefix_path is '.*/a\\nb', which holds '\\n'; give a path without"),
        ("{tmp}/a\x1b[2J", r"which holds '\\x1b'"),
        ("{tmp}/a\udcff", r"which holds '\\udcff'"),
        ("{tmp}/file/store", r"file/store.*choose another folder"),
        ("{tmp}/of others/store", "may write"),
    ],
)
def test_what_can_be_no_store_is_refused(tmp_path: Path, prefix: Any, said: str) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "of others").mkdir(0o500)
    given = prefix.format(tmp=tmp_path) if isinstance(prefix, str) else prefix
    acting = unprivileged() if said == "may write" else contextlib.nullcontext()
    with acting, pytest.raises((ConfigurationError, StoreError), match=said):
        LocalStore(given)


@pytest.mark.parametrize(
    "path",
    [
        "s3://bucket/x", "dbfs:/x", "file://other-machine/x", "dbfs:x", "s3a:bucket/x", "file:x",
        " s3://bucket/x", "./s3://bucket/x", "store/abfss://container@account/x", "new+kind://x",
        "./dbfs:/x", "a/../s3:/bucket", "/dbfs:/x", "C:\\data", "\\\\host\\share", "~nobody-here/x",
        "jar:file:/x", "./jar:file:/x.jar", "a/jar:nested:file:/x", "JAR:file:x",
    ],
)  # fmt: skip
def test_a_path_with_a_scheme_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="prefix_path is"):
        LocalStore(path)
    with pytest.raises(ConfigurationError, match="train_path is"):
        LocalStore(tmp_path / "store", train_path=path)
    assert set(os.listdir(tmp_path)) <= {"store"}


@pytest.mark.parametrize("path", ["./dbfs:/x", "s3:/x/m", "~nobody-here/m", "C:\\m", "hdfs:/m"])
def test_nothing_else_that_takes_a_path_makes_a_folder_of_a_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"path is '.*'[;,] "):
        only_local("path", path)
    with pytest.raises((ConfigurationError, StoreError)):
        RunFolder.open(f"{path}/runs/some")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_only_looks_like_a_home_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert LocalStore("./~nobody-here").prefix == f"{tmp_path}/~nobody-here"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert LocalStore("~/x").prefix == f"{tmp_path}/home/x"


def test_the_url_of_a_run_in_a_folder_opens_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    RunFolder(store, "some").write_file("report.html", b"x")
    assert RunFolder.open(f"file://{tmp_path}/runs/some/").path == f"{tmp_path}/runs/some"


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_a_file_url_is_the_path_that_it_names(tmp_path: Path, scheme: str) -> None:
    assert LocalStore(f"{scheme}{tmp_path}/a: b").prefix == f"{tmp_path}/a: b"


@pytest.mark.parametrize(
    ("there", "path", "said"), [("a", "a/below", "can't write"), ("a/file", "a", "folder")]
)
def test_write_that_can_not_be_is_refused_and_leaves_nothing(
    tmp_path: Path, there: str, path: str, said: str
) -> None:
    store = LocalStore(str(tmp_path))
    store.write(f"{store.run_path('r')}/{there}", b"x")
    with pytest.raises(StoreError, match=said):
        store.write(f"{store.run_path('r')}/{path}", b"y")
    assert os.listdir(store.run_path("r")) == ["a"]


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
