"""Programs that prepare the same rows at the same time."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cerebro_hydra.data.claim import CLAIMS, Claims, forget_claims, is_claimed
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.partition import check_partitions
from cerebro_hydra.data.preparation import prepared
from cerebro_hydra.data.preparation.prepared import find_prepared
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import LocalStore, Store
from cerebro_hydra.testing.datasets import write_dataset
from tests.processes import start_python
from tests.storage.shared_files import SharedStore

ROWS = {"x": np.random.default_rng(0).normal(size=(60, 2)), "y": np.arange(60)}
STORES = {
    "local": lambda path: LocalStore(f"{path}/store"),
    "remote": lambda path: SharedStore(f"shared://{path}/store"),
}
PROGRAM = """
import sys
import tests.data.preparation.test_data_claim as rows
from cerebro_hydra.data.preparation import prepared
from cerebro_hydra.testing.datasets import write_dataset

kind = rows.STORES[sys.argv[1]]
store = kind(sys.argv[2])
prepared.CLAIM_SECONDS = float(sys.argv[3])
write = store.write

def held(path, data):
    if "partition=00001" in path and "split=train" in path:
        print("half", flush=True)
        sys.stdin.readline()
    write(path, data)

store.write = held
print(write_dataset(store, rows.ROWS, 3, 0.3).partitions[0].path, flush=True)
"""


@pytest.fixture(params=list(STORES))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def half_way(kind: str, path: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """A program that has written half of the files and goes on at a line of input."""
    process = start_python("-c", PROGRAM, kind, path, seconds)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        yield process
    finally:
        process.kill()
        process.wait()


def assert_whole(store: Store, manifest: Manifest, scratch: Path) -> None:
    """The data is whole, and nothing else is left beside it."""
    assert find_prepared(store, manifest.fingerprint) == manifest
    assert [each.problem for each in check_partitions(manifest, store, str(scratch))] == [None] * 6
    attempt = manifest.partitions[0].path.partition("/")[0]
    assert store.list(store.data_path(manifest.fingerprint)) == [attempt, "manifest.json"]


class Waiting(logging.Handler):
    """Hears when a program says that it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said = record.getMessage()
        self.heard.set()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    handler, logger = Waiting(), logging.getLogger("cerebro_hydra.data.claim")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_one_program_waits_for_the_other(kind: str, tmp_path: Path, waiting: Waiting) -> None:
    store = STORES[kind](tmp_path)
    with ThreadPoolExecutor(1) as pool, half_way(kind, tmp_path, 30) as first:
        second = pool.submit(write_dataset, store, ROWS, 3, 0.3)
        assert waiting.heard.wait(30)
        assert f"process {first.pid} on" in waiting.said
        assert "prepares the same rows: waiting" in waiting.said
        out, _ = first.communicate("go on\n", timeout=60)
        manifest = second.result(60)
    assert out.strip() == manifest.partitions[0].path  # of the first: its files, not others
    assert first.returncode == 0
    assert_whole(store, manifest, tmp_path)


def test_program_that_is_killed_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "CLAIM_SECONDS", 0.3)
    store = STORES["local"](tmp_path)
    with half_way("local", tmp_path, 0.3) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        (fingerprint,) = store.list(f"{store.prefix}/data")
        assert find_prepared(store, fingerprint) is None
        manifest = write_dataset(store, ROWS, 3, 0.3)
    assert_whole(store, manifest, tmp_path)


CLAIMER = """
import sys
from cerebro_hydra.data.claim import Claims
from cerebro_hydra.storage import LocalStore

store = LocalStore(sys.argv[1])
print(Claims(store, store.data_path("f"), 30).take(), flush=True)
sys.stdin.readline()
"""


@contextmanager
def claimed(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program that has taken a claim, and is killed at the end."""
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().endswith(f"{CLAIMS}/000000")
        yield process
        process.kill()


def is_free(store: Store) -> bool:
    """Whether the claim can be taken at the first look."""
    return Claims(store, store.data_path("f"), 30).take() is not None


def test_claim_of_a_program_that_is_gone_from_this_machine_is_free_at_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with claimed(tmp_path) as other:
        assert not is_free(store)
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it stays a mere entry
        assert is_free(store)


def test_claim_of_a_program_that_is_stopped_holds_what_it_works_on(tmp_path: Path) -> None:
    """As by Ctrl-Z: `clean` would delete the run, and `fg` goes on with it."""
    store = LocalStore(tmp_path)
    folder = store.data_path("f")
    with claimed(tmp_path) as other:
        other.send_signal(signal.SIGSTOP)
        (claim,) = Path(folder, CLAIMS).iterdir()
        os.utime(claim, (0, 0))
        while_stopped = is_claimed(store, folder)
        other.kill()
        other.wait()
        os.utime(claim)
        assert (while_stopped, is_claimed(store, folder)) == (True, False)


@pytest.mark.parametrize(
    ("part", "another", "free"),
    [
        (rb"process \d+", b"process %d" % os.getpid(), True),  # its number was given again
        (rb"boot [0-9a-f]", b"boot x", False),
        (rb"pid:\[\d", b"pid:[9", False),
        (rb", begun.*", b"", False),
    ],
    ids=["another program", "another boot", "another namespace", "of an earlier version"],
)
def test_claim_is_free_at_once_only_if_its_program_would_be_seen(
    tmp_path: Path, part: bytes, another: bytes, free: bool
) -> None:
    store = LocalStore(tmp_path)
    with claimed(tmp_path):
        pass
    path = f"{store.data_path('f')}/{CLAIMS}/000000"
    told, count = re.subn(part, another, store.read(path))
    assert count == 1
    store.write(path, told)
    assert is_free(store) == free


OTHER_NAMESPACE = ("unshare", "--pid", "--fork")


def makes_namespaces() -> bool:
    """Whether this user may make a PID namespace."""
    if shutil.which(OTHER_NAMESPACE[0]) is None:
        return False
    return subprocess.run([*OTHER_NAMESPACE, "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not makes_namespaces(), reason="this user may make no PID namespace")
def test_claim_of_a_program_in_another_pid_namespace_holds(tmp_path: Path) -> None:
    with claimed(tmp_path):
        other = subprocess.run(
            [*OTHER_NAMESPACE, sys.executable, "-c", CLAIMER, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            input="",
            capture_output=True,
            text=True,
        )
    assert other.stdout == "None\n"


def test_what_others_put_among_claims_is_no_claim_and_stays(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    folder = store.data_path("f")
    others = ["notes.txt", "\u0663" * 6, "9" * 200]  # digits, but not those of ours
    for name in others:
        store.write(f"{folder}/{CLAIMS}/{name}", b"mine")
    assert not is_claimed(store, folder)
    assert Claims(store, folder, 30).take() == f"{folder}/{CLAIMS}/000000"
    assert is_claimed(store, folder)
    claims = Path(folder, CLAIMS)
    (claims / "000005").mkdir()  # called as a claim, and a folder
    (claims / "000005" / "thesis.tex").write_text("mine")
    (claims / ".unfinished-thesis").write_text("mine")
    forget_claims(store, folder)
    assert {each.name for each in claims.iterdir()} == {*others, "000005", ".unfinished-thesis"}
    assert (claims / "000005" / "thesis.tex").read_text() == "mine"


def test_a_hidden_file_of_others_stays_where_there_are_no_claims(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    claims = Path(store.data_path("f"), CLAIMS)
    claims.mkdir(parents=True)
    (claims / ".unfinished-thesis").write_text("mine")
    forget_claims(store, store.data_path("f"))
    assert [each.name for each in claims.iterdir()] == [".unfinished-thesis"]


def test_a_claim_that_is_a_link_to_nothing_is_an_error_and_is_not_waited_for(
    tmp_path: Path,
) -> None:
    store = LocalStore(tmp_path)
    claims = Path(store.data_path("f"), CLAIMS)
    claims.mkdir(parents=True)
    (claims / "000003").symlink_to("nowhere")
    with pytest.raises(StoreError, match="000003"):
        Claims(store, store.data_path("f"), 30).take()


def test_program_that_is_held_up_does_no_harm_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "CLAIM_SECONDS", 0.3)
    store = STORES["remote"](tmp_path)
    with half_way("remote", tmp_path, 0.3) as first:
        os.kill(first.pid, signal.SIGSTOP)
        manifest = write_dataset(store, ROWS, 3, 0.3)
        os.kill(first.pid, signal.SIGCONT)
        out, _ = first.communicate("go on\n", timeout=60)
    assert first.returncode == 0
    assert out.strip() == manifest.partitions[0].path
    assert_whole(store, manifest, tmp_path)


def test_claim_that_is_renewed_holds_and_one_given_up_is_free(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    folder = store.data_path("f")
    mine, other = (Claims(store, folder, 1) for _ in range(2))
    path = mine.take()
    assert path == f"{folder}/{CLAIMS}/000000"
    with mine.renewed(path):
        # Each look waits a sixtieth of the time: together they are longer than a claim holds.
        assert [other.take() for _ in range(80)] == [None] * 80
    assert other.take() == f"{folder}/{CLAIMS}/000001"


@pytest.mark.parametrize("ended", [True, False])
def test_of_many_programs_one_takes_the_claim(kind: str, tmp_path: Path, ended: bool) -> None:
    store = STORES[kind](tmp_path)
    folder = store.data_path("f")
    if ended:
        with Claims(store, folder, 1).renewed(Claims(store, folder, 1).take()):
            pass
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: Claims(store, folder, 1).take(), range(16)))
    assert [path for path in taken if path] == [f"{folder}/{CLAIMS}/00000{int(ended)}"]


def test_failure_gives_the_claim_up_and_clears_its_files(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def fail(attempt: str) -> Manifest:
        store.write(f"{store.data_path('f')}/{attempt}/part", b"half")
        raise StoreError("the disk is full")

    def prepare(make: Callable[[str], Manifest]) -> None:
        with pytest.raises(StoreError, match="the disk is full"):
            prepared.prepare_once(store, "f", make)
        assert store.list(store.data_path("f")) == [CLAIMS]

    prepare(fail)
    prepare(fail)  # without waiting for a claim to end
