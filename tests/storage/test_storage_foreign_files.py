"""What others put into a store: links, FIFOs, devices, sockets, files of no name of ours."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from cerebro_hydra import SparkEstimator
from cerebro_hydra.errors import AllTrialsFailed, StoreError
from cerebro_hydra.storage import LocalStore, RunFolder
from tests.end_to_end import models
from tests.end_to_end.drivers.resumed_driver import search
from tests.end_to_end.runs import classes


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(LocalStore(str(tmp_path / "store")), "run-1")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Somebody's folder, which has files with names like ours, too."""
    folder = tmp_path / "foreign"
    (folder / "deep").mkdir(parents=True)
    digest = xxhash.xxh3_128_hexdigest(b"")
    for name in ("thesis.tex", f"{digest}.safetensors", "deep/photo.jpg", f".unfinished-{digest}"):
        (folder / name).write_text(name)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(file): file.read_text() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("linked", ["objects", "journal", "trials", "trials/trial-000", "claims"])
def test_nothing_is_deleted_through_a_link(run: RunFolder, foreign: Path, linked: str) -> None:
    before = content(foreign)
    link = Path(run.path, linked)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(foreign)
    for name in os.listdir(foreign):
        with pytest.raises(StoreError, match=rf"{linked}' is a link to .*foreign"):
            run.store.delete(f"{link}/{name}")
    run.store.delete_unfinished(run.path)
    if linked == "objects":
        with pytest.raises(StoreError, match="is a link"):
            run.sweep({})
    assert content(foreign) == before
    run.store.delete(run.path)
    assert content(foreign) == before and not Path(run.path).exists()


def test_a_run_that_is_a_link_is_not_deleted_through_it(run: RunFolder, foreign: Path) -> None:
    (foreign / "run.json").write_text("{}")
    Path(run.path).symlink_to(foreign)
    with pytest.raises(StoreError, match="run-1' is a link"):
        run.store.delete(f"{run.path}/run.json")
    with pytest.raises(StoreError, match="run-1' is a link"):
        run.store.delete_unfinished(run.path)
    assert (foreign / "run.json").exists()


def test_a_store_may_lie_behind_links_and_so_may_its_two_folders(tmp_path: Path) -> None:
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "runs").symlink_to(tmp_path / "disk" / "runs")
    store = LocalStore(str(tmp_path / "store"))
    store.write(f"{store.run_path('r')}/objects/one", b"1")
    store.delete(f"{store.run_path('r')}/objects/one")
    assert store.list(f"{store.run_path('r')}/objects") == []


def test_a_sweep_leaves_what_others_put_there(run: RunFolder, foreign: Path) -> None:
    run.write_object("ab" * 16, b"nobody's")
    objects = Path(run.path, "objects")
    foreign.rename(objects / "folder")
    for name in ("notes.txt", "AB.safetensors", ".unfinished-notes"):
        (objects / name).write_text(name)
    named = objects / f"{'cd' * 16}.safetensors"  # a folder, though called as a file of ours
    named.mkdir()
    (named / "novel.txt").write_text("once")
    before = content(objects)
    run.sweep({})
    run.delete_object("cd" * 16)
    del before[str(objects / f"{'ab' * 16}.safetensors")]
    unfinished = objects / "folder" / f".unfinished-{xxhash.xxh3_128_hexdigest(b'')}"
    del before[str(unfinished)]
    assert content(objects) == before


def test_a_search_begins_in_no_folder_of_others(tmp_path: Path) -> None:
    notes = tmp_path / "runs" / "notes"
    notes.mkdir(parents=True)
    (notes / "thesis.tex").write_text("thesis")
    with pytest.raises(StoreError, match=r"notes' is not a run: a run is <store>/runs/<run id>"):
        search(tmp_path, 1, num_epochs=1, observers=[]).fit(classes(), resume=str(notes))
    assert os.listdir(notes) == ["thesis.tex"]


def without_models(params: dict[str, Any]) -> SparkEstimator:
    """Make the model that is looked at first, and none after the rows were prepared."""
    if list(Path(params["place"]).glob("data/*/manifest.json")):
        raise ValueError("no more models")
    return models.feed_forward({"lr": 0.1, "dropout": 0.2})


def test_a_run_that_cannot_begin_leaves_what_others_put_there(tmp_path: Path) -> None:
    run = RunFolder(LocalStore(str(tmp_path)), "20260101-120000-abcdef")
    theirs = ("thesis.tex", "objects/a.txt", "trials/trial-000/b.txt", "claims/c", "models/d")
    for name in theirs:
        file = Path(run.path, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    before = content(Path(run.path))
    space = {"place": [str(tmp_path)]}
    fails = search(tmp_path, 1, num_epochs=1, observers=[], factory=without_models, space=space)
    with pytest.raises(AllTrialsFailed, match="no more models"):
        fails.fit(classes(), resume=run.path)
    assert content(Path(run.path)) == before
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(AllTrialsFailed, match="no more models"):
        fails.fit(classes())
    assert os.listdir(tmp_path / "runs") == [run.run_id]


def as_fifo(path: Path) -> None:
    os.mkfifo(path)


def as_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)  # a socket's path may have 108 characters
        server.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "kind"), [(as_fifo, "a FIFO"), (as_socket, "a socket"), (as_device, "a device")]
)
@pytest.mark.parametrize("name", ["run.json", "journal/00000000.jsonl", "objects"])
def test_what_is_no_plain_file_is_an_error_at_once(
    run: RunFolder, make: Callable[[Path], None], kind: str, name: str
) -> None:
    path = Path(run.path, name)
    if name == "objects":
        path = path / f"{'ab' * 16}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    with pytest.raises(StoreError, match=rf"{path.name}' is {kind} and no plain file: restore"):
        match name:
            case "run.json":
                run.read_json(name)
            case "objects":
                run.read_object("ab" * 16)
            case _:
                list(run.read_segments())


@pytest.mark.parametrize("name", ["run.json", "objects"])
def test_a_file_for_which_there_is_no_memory_is_refused_before_it_is_read(
    run: RunFolder, name: str
) -> None:
    path = Path(run.path, name)
    if name == "objects":
        path = path / f"{'ab' * 16}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(1 << 43)  # a hole of 8 TiB
    with pytest.raises(StoreError, match=r"has 8,796,093,022,208 bytes, and this process may take"):
        run.read_json(name) if name == "run.json" else run.read_object("ab" * 16)


def test_a_resumed_run_deletes_nothing_behind_a_link(tmp_path: Path, foreign: Path) -> None:
    place = str(tmp_path / "store")
    run = search(place, 1, num_epochs=1, observers=[]).fit(classes()).run_path
    for file in Path(run, "objects").iterdir():
        file.rename(foreign / file.name)
    Path(run, "objects").rmdir()
    Path(run, "objects").symlink_to(foreign)
    before = content(foreign / "deep") | {"thesis": (foreign / "thesis.tex").read_text()}
    result = search(place, 1, num_epochs=2, observers=[]).fit(classes(), resume=run)
    assert [trial.status for trial in result.trials] == ["finished"] * 3
    after = content(foreign / "deep") | {"thesis": (foreign / "thesis.tex").read_text()}
    assert after == before
