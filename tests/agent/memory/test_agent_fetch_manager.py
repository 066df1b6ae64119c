"""Fetches that end badly or too late harm no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.agent.memory.fetch import FetchManager, FetchRequest
from cerebro_hydra.agent.memory.shard_store import Shard, ShardHome, ShardStore
from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.wire.credentials import new_credentials
from cerebro_hydra.wire.shards import ClientPool, ShardServer
from tests.agent.standins import SECONDS, Peer, empty_store

CREDENTIALS = new_credentials()


class Bench:
    """FetchManager of one agent with two peers."""

    def __init__(self) -> None:
        self.shard_store = empty_store()
        self.peers = {"uri-a": Peer(1), "uri-b": Peer(2)}
        self.whole: list[tuple[int, int]] = []
        self.told = threading.Event()
        folder: Any = None
        connect: Any = lambda uri: self.peers[uri].lent()  # noqa: E731
        self.fetch_manager = FetchManager("me", self.shard_store, folder, connect, self.on_whole)

    def on_whole(self, trial: int, visit: int) -> None:
        self.whole.append((trial, visit))
        self.told.set()

    def bring(self, owner: str) -> Peer:
        self.fetch_manager.fetch(FetchRequest(0, 3, 1, owner, f"uri-{owner}"))
        peer = self.peers[f"uri-{owner}"]
        assert peer.asked.wait(SECONDS)
        return peer


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.fetch_manager.close()


def test_a_fetch_that_ends_late_leaves_the_next_one_of_that_state_alone(bench: Bench) -> None:
    lost = bench.bring("a")
    bench.fetch_manager.drop(0, 3)
    found = bench.bring("b")
    lost.error = Cancelled("its owner is gone")
    lost.answer.set()
    assert lost.left.wait(SECONDS)
    found.answer.set()
    assert bench.told.wait(SECONDS)
    assert bench.shard_store.whole(0, 3)
    assert bench.shard_store.wait(0, 3, 0).segments["trainable"][1][0] == found.fill


def test_a_shard_that_comes_late_is_not_taken_for_one_of_the_next_fetch(bench: Bench) -> None:
    lost = bench.bring("a")
    bench.fetch_manager.drop(0, 3)
    found = bench.bring("b")
    lost.answer.set()
    assert lost.left.wait(SECONDS)
    assert not bench.shard_store.whole(0, 3)
    assert bench.whole == []
    found.answer.set()
    assert bench.told.wait(SECONDS)
    assert bench.whole == [(0, 3)]


@contextmanager
def serving(shard_store: ShardStore) -> Iterator[ShardServer]:
    """Serve a shard store as an agent does."""
    server = ShardServer(
        "127.0.0.1",
        CREDENTIALS,
        lambda request: shard_store.follow(request.trial, request.visit),
        digest,
    )
    shard_store.on_change = server.look_again
    yield server
    server.close()


def publish(shard_store: ShardStore, visit: int) -> None:
    state = shard_store.expect(0, visit, shards=3)
    for number in (2, 1, 0):  # as the last window of a sub-epoch does
        shard_store.put(state, number, made(visit, number))


def made(*key: int) -> Shard:
    segments = {name: np.array([*key, len(name)], np.uint8) for name in ("frozen", "trainable")}
    return Shard({name: (digest(each), each) for name, each in segments.items()}, {"step": 1})


class Receiver:
    """A FetchManager over the real wire, which notes the states that are whole."""

    def __init__(self, digest_of: Callable[[Any], str] = digest) -> None:
        self.shard_store = empty_store()
        self.whole: SimpleQueue[tuple[int, int]] = SimpleQueue()
        folder: Any = None
        self.fetch_manager = FetchManager(
            "me",
            self.shard_store,
            folder,
            ClientPool(CREDENTIALS, digest_of).client,
            lambda trial, visit: self.whole.put((trial, visit)),
        )

    def fetch(self, uri: str, visit: int) -> None:
        self.fetch_manager.fetch(FetchRequest(0, visit, 3, "owner", uri))

    def threads(self) -> list[threading.Thread]:
        """Return this manager's own threads, for others of this process may still end theirs."""
        return [each for each in self.fetch_manager._threads._threads if each.is_alive()]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.fetch_manager.close()


def test_two_hundred_fetches_share_a_connection_and_a_thread(receiver: Receiver) -> None:
    held = empty_store()
    with serving(held) as server:
        for visit in range(200):
            publish(held, visit)
            receiver.fetch(server.uri, visit)
            assert receiver.whole.get(timeout=SECONDS) == (0, visit)
        assert len(receiver.threads()) <= 2, "one ends while the next begins"
        assert len(server._listener.connections) <= 2


def test_fetches_that_come_before_their_states_end_well(receiver: Receiver) -> None:
    held = empty_store()
    with serving(held) as server:
        for visit in range(50):
            receiver.fetch(server.uri, visit)
        for visit in range(50):
            publish(held, visit)
        assert {receiver.whole.get(timeout=SECONDS) for _ in range(50)} == {
            (0, visit) for visit in range(50)
        }
        for number in range(3):
            assert receiver.shard_store.wait(0, 7, number).digests == made(7, number).digests


def test_closing_ends_fetches_of_what_never_comes(receiver: Receiver) -> None:
    with serving(empty_store()) as server:
        for visit in range(50):
            receiver.fetch(server.uri, visit)
        receiver.fetch_manager.close()
    assert not receiver.threads()
    assert receiver.whole.empty()


def test_a_fetch_of_a_state_that_its_owner_withdraws_waits_until_it_is_dropped(
    receiver: Receiver,
) -> None:
    held = empty_store()
    with serving(held) as server:
        state = held.expect(0, 1, shards=3)
        held.put(state, 2, made(1, 2))
        receiver.fetch(server.uri, 1)
        assert receiver.shard_store.wait(0, 1, 2).digests == made(1, 2).digests
        held.retract(state)
        assert receiver.shard_store.knows(0, 1)
        receiver.fetch_manager.drop(0, 1)
        assert not receiver.shard_store.knows(0, 1)
        receiver.fetch_manager.close()
    assert not receiver.threads()


class DamagedHome:
    """A worker's memory with a shard whose frozen bytes somebody has written to."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(LocalStore(str(path / "store")), "run")
        self.shard_store = empty_store()
        segments = self.shard_store.segments
        named = {}
        for name, fill in (("frozen", 3), ("trainable", 4)):
            buffer = segments.allocate(64)
            buffer[:] = fill
            named[name] = (digest(buffer), buffer)
        state = self.shard_store.expect(0, 0, shards=1)
        self.shard_store.put(state, 0, Shard(named, {"step": 1}))
        held = self.shard_store.wait(0, 0, 0)
        self.home = ShardHome(held, segments, str(path))
        self.frozen = held.digests[0]
        named["frozen"][1][5] = 9
        connect: Any = None
        whole: Any = None
        self.fetch_manager = FetchManager("me", self.shard_store, self.folder, connect, whole)


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[DamagedHome]:
    made = DamagedHome(tmp_path)
    yield made
    made.fetch_manager.close()


def test_frozen_bytes_that_were_written_to_are_read_from_the_store(damaged: DamagedHome) -> None:
    damaged.folder.write_object(damaged.frozen, bytes([3] * 64))
    before = damaged.shard_store.segments.get(damaged.frozen)
    assert before is not None and before[5] == 9
    damaged.fetch_manager.mend([damaged.home])
    assert before.tobytes() == bytes([3] * 64), "whoever has these bytes has them mended"
    assert damaged.shard_store.segments.get(damaged.frozen) is not None


def test_frozen_bytes_that_the_store_lacks_are_forgotten(
    damaged: DamagedHome, caplog: pytest.LogCaptureFixture
) -> None:
    damaged.fetch_manager.mend([damaged.home])
    assert damaged.shard_store.segments.get(damaged.frozen) is None
    with pytest.raises(TransferError, match="was dropped here"):
        _ = damaged.shard_store.wait(0, 0, 0).segments
    assert "a frozen segment that a trial has changed is forgotten" in caplog.text


def test_frozen_bytes_that_nobody_wrote_to_are_not_read_again(damaged: DamagedHome) -> None:
    segment = damaged.shard_store.segments.get(damaged.frozen)
    assert segment is not None
    segment[5] = 3
    damaged.fetch_manager.mend([damaged.home])  # the store has none to read
    assert damaged.shard_store.segments.get(damaged.frozen) is not None


def test_an_owner_is_asked_before_a_state_is_called_damaged(receiver: Receiver) -> None:
    """It is not asked for the bytes again, which are others there than it has told."""
    held, changed = empty_store(), SimpleQueue[None]()
    receiver.shard_store.on_change = lambda: changed.put(None)
    with serving(held) as server:
        publish(held, 1)
        held.wait(0, 1, 2).segments["trainable"][1][1] ^= 1
        receiver.fetch(server.uri, 1)
        while (error := receiver.fetch_manager.error(0, 1)) is None:
            changed.get(timeout=SECONDS)
    assert "its owner says that segment 'trainable' was written to after it was publ" in error
    assert receiver.fetch_manager.altered(0, 1)


def test_bytes_that_were_damaged_on_the_way_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cerebro_hydra.agent.memory.fetch.RETRY_SECONDS", 0.0)
    damages = iter(["damaged"])
    receiver, held = Receiver(lambda buffer: next(damages, None) or digest(buffer)), empty_store()
    with serving(held) as server:
        publish(held, 1)
        receiver.fetch(server.uri, 1)
        assert receiver.whole.get(timeout=SECONDS) == (0, 1)
        receiver.fetch_manager.close()
    assert not receiver.fetch_manager.altered(0, 1)
    assert next(damages, None) is None
