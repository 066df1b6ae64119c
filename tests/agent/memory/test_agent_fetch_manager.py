"""Fetches that end badly, too late or in their middle harm no other, and leave no memory lent."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.agent.memory.fetch import Fetch, FetchManager, FetchRequest
from cerebro_hydra.agent.memory.shard_store import Shard, ShardHome, ShardStore
from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.wire.connection import encode
from cerebro_hydra.wire.credentials import Credentials, new_credentials
from cerebro_hydra.wire.messages import ShardRequest
from cerebro_hydra.wire.shards import ClientPool, ShardServer
from tests.agent.standins import SECONDS, Peer, empty_store

PLAIN = new_credentials()
SIZE = 16 << 20
"""Bytes of a segment, more than the buffers of a connection take."""

NOBODY: Any = None


class Receiver:
    """A FetchManager over the real wire, or another, which notes the states that are whole."""

    def __init__(
        self, credentials: Credentials = PLAIN, budget: int = 1 << 30, connect: Any = None
    ) -> None:
        self.store = empty_store(budget)
        self.whole: SimpleQueue[tuple[int, int]] = SimpleQueue()
        connect = connect or ClientPool(credentials, digest).client
        self.manager = FetchManager(
            "me", self.store, NOBODY, connect, lambda trial, state: self.whole.put((trial, state))
        )

    @property
    def leased(self) -> int:
        return self.store.segments.pool.leased

    def fetch(self, uri: str, state: int = 1, shards: int = 3, owner: str = "owner") -> None:
        self.manager.fetch(FetchRequest(0, state, shards, owner, uri))

    def threads(self) -> list[threading.Thread]:
        """Return this manager's own threads, for others of this process may still end theirs."""
        return [each for each in self.manager._threads._threads if each.is_alive()]


@pytest.fixture
def made() -> Iterator[Callable[..., Receiver]]:
    receivers: list[Receiver] = []

    def make(*args: Any, **options: Any) -> Receiver:
        receivers.append(Receiver(*args, **options))
        return receivers[-1]

    yield make
    for receiver in receivers:
        receiver.manager.close()


@pytest.fixture
def receiver(made: Callable[..., Receiver]) -> Receiver:
    return made()


@contextmanager
def serving(store: ShardStore, credentials: Credentials = PLAIN) -> Iterator[ShardServer]:
    """Serve a shard store as an agent does."""
    follow = lambda asked: store.follow(asked.trial, asked.state)  # noqa: E731
    server = ShardServer("127.0.0.1", credentials, follow, digest)
    store.on_change = server.look_again
    yield server
    server.close()


def publish(
    store: ShardStore, state: int = 1, shards: int = 3, first: int = 0, size: int = 3
) -> None:
    """Announce a state, and publish its shards from the first on, as a last window does."""
    expected = store.expect(0, state, shards)
    for number in reversed(range(first, shards)):
        segments = {}
        for name in ("frozen", "trainable"):
            buffer = store.segments.allocate(size if name == "trainable" else 64)
            buffer[:] = (state + number + len(name)) % 256
            segments[name] = digest(buffer), buffer
        store.put(expected, number, Shard(segments, {"step": 1}))


# ---------------------------------------------------------------------- late answers


@pytest.mark.parametrize("fails", [True, False])
def test_a_fetch_that_ends_late_leaves_the_next_one_of_that_state_alone(
    made: Callable[..., Receiver], fails: bool
) -> None:
    peers = {"uri-a": Peer(1), "uri-b": Peer(2)}
    receiver = made(connect=lambda uri: peers[uri].lent())
    for owner in "ab":
        receiver.fetch(f"uri-{owner}", 3, 1, owner)
        assert peers[f"uri-{owner}"].asked.wait(SECONDS)
        if owner == "a":
            receiver.manager.drop(0, 3)
    lost, found = peers.values()
    lost.error = Cancelled("its owner is gone") if fails else None
    lost.answer.set()
    assert lost.left.wait(SECONDS)
    assert not receiver.store.whole(0, 3) and receiver.whole.empty()
    found.answer.set()
    assert receiver.whole.get(timeout=SECONDS) == (0, 3)
    assert receiver.store.wait(0, 3, 0).segments["trainable"][1][0] == found.fill


# ---------------------------------------------------------------------- many, early, and none


def test_two_hundred_fetches_share_a_connection_and_a_thread(receiver: Receiver) -> None:
    held = empty_store()
    with serving(held) as server:
        for state in range(200):
            publish(held, state)
            receiver.fetch(server.uri, state)
            assert receiver.whole.get(timeout=SECONDS) == (0, state)
        assert len(receiver.threads()) <= 2, "one ends while the next begins"
        assert len(server._listener.connections) <= 2


def test_fetches_that_come_before_their_states_end_well(receiver: Receiver) -> None:
    held = empty_store()
    with serving(held) as server:
        for state in range(50):
            receiver.fetch(server.uri, state)
        for state in range(50):
            publish(held, state)
        whole = {receiver.whole.get(timeout=SECONDS) for _ in range(50)}
        assert whole == {(0, state) for state in range(50)}
        for number in range(3):
            mine, theirs = (store.wait(0, 7, number) for store in (receiver.store, held))
            assert mine.digests == theirs.digests


def test_closing_ends_fetches_of_what_never_comes(receiver: Receiver) -> None:
    with serving(empty_store()) as server:
        for state in range(50):
            receiver.fetch(server.uri, state)
        receiver.manager.close()
    assert not receiver.threads()
    assert receiver.whole.empty()


def test_a_fetch_of_a_state_that_its_owner_withdraws_waits_until_it_is_dropped(
    receiver: Receiver,
) -> None:
    held = empty_store()
    with serving(held) as server:
        publish(held, first=2)
        receiver.fetch(server.uri)
        assert receiver.store.wait(0, 1, 2).digests == held.wait(0, 1, 2).digests
        held.withdraw(0, 1)
        assert receiver.store.knows(0, 1)
        receiver.manager.drop(0, 1)
        assert not receiver.store.knows(0, 1)
        receiver.manager.close()
    assert not receiver.threads()


# ---------------------------------------------------------------------- ends in the middle


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Let references alone free memory: an agent may not collect for minutes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def becomes(condition: Callable[[], object]) -> bool:
    """Return whether a condition holds before long."""
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)  # nobody tells when memory or a connection is free
    return bool(condition())


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("tls", [False, True])
def test_an_owner_keeps_nothing_of_what_a_receiver_left_in_the_middle(
    made: Callable[..., Receiver], tls: bool
) -> None:
    credentials = new_credentials(tls=tls)
    held, receiver = empty_store(), made(credentials)
    stalled, left = threading.Event(), threading.Event()

    def allocate(nbytes: int) -> Any:
        stalled.set()
        assert left.wait(SECONDS)
        return np.empty(nbytes, np.uint8)

    stalling: Any = SimpleNamespace(get=lambda name: None, allocate=allocate)
    receiver.store.segments, own = stalling, receiver.store.segments
    with serving(held, credentials) as server:
        publish(held, shards=1, size=SIZE)
        receiver.fetch(server.uri, shards=1)
        assert stalled.wait(SECONDS)
        receiver.store.segments = own
        (connection,) = server._listener.connections
        assert becomes(lambda: not connection._writable.is_set()), "it is not in the middle"
        receiver.manager.drop(0, 1)
        left.set()
        assert becomes(lambda: not server._listener.connections)
        held.withdraw(0, 1)
        assert becomes(lambda: held.segments.pool.leased == 64), "a sender still refers to it"


class HalfOwner(threading.Thread):
    """An owner that sends half of what it offered, and then nothing."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.uri = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.half_sent = threading.Event()
        self.start()

    def run(self) -> None:
        accepted, _ = self._listening.accept()
        lines = accepted.makefile("rb")
        lines.readline()  # the secret
        assert "fetch" in json.loads(lines.readline())
        offer = {"number": 0, "segments": {"trainable": ("00", SIZE)}, "cursor": {}}
        accepted.sendall(encode("shard", offer))
        assert json.loads(lines.readline()) == {"send": ["trainable"]}
        accepted.sendall(bytes(SIZE // 2))
        self.half_sent.set()
        lines.readline()  # until the receiver leaves
        accepted.close()
        self._listening.close()


@pytest.mark.usefixtures("no_collection")
def test_a_receiver_keeps_nothing_of_a_fetch_that_is_dropped_in_the_middle(
    receiver: Receiver,
) -> None:
    owner = HalfOwner()
    receiver.fetch(owner.uri, shards=1)
    assert owner.half_sent.wait(SECONDS)
    assert receiver.leased == SIZE
    receiver.manager.drop(0, 1)
    assert becomes(lambda: receiver.leased == 0), "the fetch still refers to it"
    owner.join(SECONDS)
    assert not owner.is_alive()


@pytest.mark.usefixtures("no_collection")
def test_what_has_come_may_be_spilled_while_the_rest_is_waited_for(
    made: Callable[..., Receiver],
) -> None:
    held, receiver = empty_store(), made(budget=SIZE + 64)
    with serving(held) as server:
        publish(held, shards=2, first=1, size=SIZE)
        receiver.fetch(server.uri, shards=2)
        receiver.store.wait(0, 1, 1)
        assert becomes(lambda: receiver.store.segments.has_room(SIZE)), "it can't be spilled"
        receiver.manager.drop(0, 1)


def test_a_fetch_that_is_taken_back_before_it_begins_never_ends_another_one() -> None:
    held, here = empty_store(), empty_store()
    asked = ShardRequest(0, 1, "owner", (0,))

    def ignore(*_: object) -> None:
        """Take no notice."""

    with serving(held) as server:
        publish(held, shards=1, size=SIZE)
        pool = ClientPool(PLAIN, digest)
        with pool.client(server.uri) as first:
            list(first.fetch(asked, here.segments.get, here.segments.allocate))
        request = FetchRequest(0, 1, 1, "owner", server.uri)
        taken_back = Fetch(request, here, NOBODY, pool.client, ignore, ignore)
        taken_back.cancel()
        with ThreadPoolExecutor(1) as threads:
            taken_back.start(threads)
        with pool.client(server.uri) as another:
            assert another is first
            taken_back.cancel()
            (shard,) = another.fetch(asked, here.segments.get, here.segments.allocate)
        assert shard.bytes_moved == SIZE + 64
        pool.close()


# ---------------------------------------------------------------------- bytes that are others


class DamagedHome:
    """A worker's memory with a shard whose frozen bytes somebody has written to."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(LocalStore(str(path / "store")), "run")
        self.store = empty_store()
        segments = self.store.segments
        named = {}
        for name, fill in (("frozen", 3), ("trainable", 4)):
            buffer = segments.allocate(64)
            buffer[:] = fill
            named[name] = (digest(buffer), buffer)
        state = self.store.expect(0, 0, shards=1)
        self.store.put(state, 0, Shard(named, {"step": 1}))
        held = self.store.wait(0, 0, 0)
        self.home = ShardHome(held, segments)
        self.frozen = held.digests[0]
        named["frozen"][1][5] = 9
        self.manager = FetchManager("me", self.store, self.folder, NOBODY, NOBODY)


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[DamagedHome]:
    made = DamagedHome(tmp_path)
    yield made
    made.manager.close()


def test_frozen_bytes_that_were_written_to_are_read_from_the_store(damaged: DamagedHome) -> None:
    damaged.folder.write_object(damaged.frozen, bytes([3] * 64))
    before = damaged.store.segments.get(damaged.frozen)
    assert before is not None and before[5] == 9
    damaged.manager.mend([damaged.home])
    assert before.tobytes() == bytes([3] * 64), "whoever has these bytes has them mended"
    assert damaged.store.segments.get(damaged.frozen) is not None


def test_frozen_bytes_that_the_store_lacks_are_forgotten(
    damaged: DamagedHome, caplog: pytest.LogCaptureFixture
) -> None:
    damaged.manager.mend([damaged.home])
    assert damaged.store.segments.get(damaged.frozen) is None
    with pytest.raises(TransferError, match="was dropped here"):
        _ = damaged.store.wait(0, 0, 0).segments
    assert "a frozen segment that a trial has changed is forgotten" in caplog.text


def test_frozen_bytes_that_nobody_wrote_to_are_not_read_again(damaged: DamagedHome) -> None:
    segment = damaged.store.segments.get(damaged.frozen)
    assert segment is not None
    segment[5] = 3
    damaged.manager.mend([damaged.home])  # the store has none to read
    assert damaged.store.segments.get(damaged.frozen) is not None


def test_an_owner_is_asked_before_a_state_is_called_damaged(receiver: Receiver) -> None:
    """It is not asked for the bytes again, which are others there than it has told."""
    held, changed = empty_store(), SimpleQueue[None]()
    receiver.store.on_change = lambda: changed.put(None)
    with serving(held) as server:
        publish(held)
        held.wait(0, 1, 2).segments["trainable"][1][1] ^= 1
        receiver.fetch(server.uri)
        while (error := receiver.manager.error(0, 1)) is None:
            changed.get(timeout=SECONDS)
    assert "its owner says that segment 'trainable' was written to after it was publ" in error
    assert receiver.manager.altered(0, 1)


def test_bytes_that_were_damaged_on_the_way_are_asked_for_again(
    made: Callable[..., Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro_hydra.agent.memory.fetch.RETRY_SECONDS", 0.0)
    damages = iter(["damaged"])
    damaging = ClientPool(PLAIN, lambda buffer: next(damages, None) or digest(buffer))
    receiver, held = made(connect=damaging.client), empty_store()
    with serving(held) as server:
        publish(held)
        receiver.fetch(server.uri)
        assert receiver.whole.get(timeout=SECONDS) == (0, 1)
        receiver.manager.close()
    assert not receiver.manager.altered(0, 1)
    assert next(damages, None) is None


@pytest.mark.parametrize("again", [False, True], ids=["once", "for good"])
def test_an_object_that_is_damaged_in_the_store_is_read_twice_and_no_more(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trial fails soon, and does not wait as for a store that is away."""
    monkeypatch.setattr("cerebro_hydra.agent.memory.fetch.STORE_PAUSES", (0.0, 3600.0))
    content, folder = np.full(64, 4, np.uint8), RunFolder(LocalStore(str(tmp_path)), "run")
    name, changed = digest(content), SimpleQueue[None]()
    shard = {"frozen": name, "trainable": name, "cursor": None}
    folder.write_state(0, 7, {"trial": 0, "state": 7, "shards": [shard]})
    content[5] = 9
    folder.write_object(name, content)
    if not again:
        content[5] = 4
        read = folder.read_object

        def read_and_mend(*args: Any) -> Any:
            try:
                return read(*args)
            finally:
                folder.store.write(f"{folder.path}/objects/{name}.safetensors", content)

        monkeypatch.setattr(folder, "read_object", read_and_mend)
    store = empty_store()
    store.on_change = lambda: changed.put(None)
    manager = FetchManager("me", store, folder, NOBODY, lambda *state: None)
    manager.fetch(FetchRequest(0, 7, 1, None, None))
    while manager.error(0, 7) is None and not store.whole(0, 7):
        changed.get(timeout=SECONDS)
    assert manager.altered(0, 7) is again
    assert not again or "is damaged: the 64 bytes of" in str(manager.error(0, 7))
    manager.close()
