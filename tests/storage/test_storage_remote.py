from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.errors import ConfigurationError, SetupError, StoreError
from cerebro_hydra.storage import HDFSStore, RunFolder, Store
from cerebro_hydra.testing.stores import StoreCase
from tests.storage.shared_files import SharedFileSystem, SharedStore


class TestSharedStore(StoreCase):
    def make_store(self, tmp_path: Path) -> Store:
        return SharedStore(f"shared://{tmp_path}/a store")


@pytest.fixture
def store(tmp_path: Path) -> SharedStore:
    return SharedStore(f"shared://{tmp_path}/store")


def test_run_is_opened_by_its_url_alone(store: SharedStore) -> None:
    RunFolder(store, "run-1").write_json("run.json", {"seed": 7})
    opened = RunFolder.open(f"{store.run_path('run-1')}/")
    assert (opened.path, opened.read_json("run.json")) == (store.run_path("run-1"), {"seed": 7})
    with pytest.raises(StoreError, match=r"run-2.*\['run-1'\]"):
        RunFolder.open(store.run_path("run-2"))
    with pytest.raises(StoreError, match=r"pigeon://.*known are \['file', .*'shared'\]"):
        RunFolder.open("pigeon://loft/runs/run-1")


def test_write_that_fails_half_way_leaves_nothing(
    store: SharedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(f"{store.prefix}/file", b"before")

    def torn(*arguments: Any, **options: Any) -> None:
        raise OSError("the connection broke")

    monkeypatch.setattr(SharedFileSystem, "mv", torn)
    with pytest.raises(StoreError, match=r"can't write .*file': the connection broke"):
        store.write(f"{store.prefix}/file", b"after")
    assert (tmp_path / "store" / "file").read_bytes() == b"before"
    assert sorted(os.listdir(tmp_path / "store")) == ["data", "file", "runs"]


def test_unfinished_write_of_a_crashed_process_is_not_listed(
    store: SharedStore, tmp_path: Path
) -> None:
    store.write(f"{store.prefix}/data/file", b"x")
    (tmp_path / "store" / "data" / f".unfinished-{'01' * 16}").write_bytes(b"half")
    assert store.list(f"{store.prefix}/data") == ["file"]
    store.delete_unfinished(store.prefix)
    assert os.listdir(tmp_path / "store" / "data") == ["file"]


def test_file_that_is_replaced_while_it_is_read_is_read_again(
    store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(f"{store.prefix}/file", b"whole")
    opened = SharedFileSystem.open
    failures = 2

    def flaky(self: SharedFileSystem, path: str, mode: str) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError("no data node has the block")
        return opened(self, path, mode)

    monkeypatch.setattr(SharedFileSystem, "open", flaky)
    assert store.read(f"{store.prefix}/file") == b"whole"
    failures = 3
    with pytest.raises(StoreError, match="no data node has the block"):
        store.read(f"{store.prefix}/file")


def test_connection_is_of_one_process_and_of_one_store(store: SharedStore) -> None:
    mine = store._files
    assert store._files is mine
    assert copy.deepcopy(store)._files is not mine
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"same" if store._files is mine else b"own!")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 4) == b"own!"
    os.close(read), os.close(write)


def test_error_of_a_java_server_is_cut_to_its_message(
    store: SharedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*arguments: Any, **options: Any) -> None:
        raise RuntimeError(
            'RPCError("org.apache.hadoop.security.AccessControlException", "Permission denied: '
            'user=me\\n\\tat org.apache.hadoop.Some(Some.java:1)")'
        )

    monkeypatch.setattr(SharedFileSystem, "makedirs", denied)
    with pytest.raises(StoreError, match=r"user=me; choose a folder that this user may write"):
        SharedStore(store.prefix)


@pytest.mark.parametrize("mark", "#?%")
def test_prefix_that_would_be_another_url_is_refused(tmp_path: Path, mark: str) -> None:
    with pytest.raises(StoreError, match="mean something else in a URL"):
        SharedStore(f"shared://{tmp_path}/run{mark}1")


class HDFSStoreOnFiles(HDFSStore):
    """HDFSStore's own reading of its arguments, over files that need no name node."""

    scheme = ""

    def _connect(self) -> SharedFileSystem:
        class Files(SharedFileSystem):
            def makedirs(self, path: str, exist_ok: bool = False) -> None:
                pass

        return Files(skip_instance_cache=True)


@pytest.mark.parametrize(
    ("arguments", "prefix"),
    [
        ({"prefix_path": "hdfs://nn:8020/user/me/cerebro/"}, "hdfs://nn:8020/user/me/cerebro"),
        ({"prefix_path": "hdfs://nn/nn"}, "hdfs://nn/nn"),
        ({"prefix_path": "/user/me", "host": "nn", "port": 8020}, "hdfs://nn:8020/user/me"),
        ({"prefix_path": "/user/me", "host": "Nameservice1"}, "hdfs://Nameservice1/user/me"),
        ({"prefix_path": "hdfs:///user/me"}, "hdfs:///user/me"),
        ({"prefix_path": "/user/me"}, "hdfs:///user/me"),
    ],
)
def test_hdfs_prefix_has_one_form(arguments: dict[str, Any], prefix: str) -> None:
    assert HDFSStoreOnFiles(**arguments).prefix == prefix


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prefix_path": "s3://bucket/path"}, "absolute path of HDFS"),
        ({"prefix_path": "user/me"}, "absolute path of HDFS"),
        ({"prefix_path": "hdfs://nn/user", "host": "other"}, "names its host already"),
        ({"prefix_path": "/user", "port": 8020}, "port is 8020 without a host"),
    ],
)
def test_hdfs_prefix_that_is_none_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        HDFSStore(**arguments)


def test_hdfs_user_must_be_the_acting_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "me")
    store = HDFSStoreOnFiles("/user/me", user="me")
    assert Store.from_dict(store.to_dict()).to_dict() == store.to_dict()
    assert "user" not in HDFSStoreOnFiles("/user/me").to_dict()
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    with pytest.raises(ConfigurationError, match=r"acts as 'somebody'.*HADOOP_USER_NAME=me"):
        Store.from_dict(store.to_dict())


def test_hdfs_without_its_client_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native.fsspec", None)
    with pytest.raises(SetupError, match=r"pip install 'cerebro-hydra\[hdfs\]'"):
        HDFSStore("hdfs://nn:8020/user/me")
