"""A transfer that ends in its middle leaves no memory lent, at neither end, and harms no other."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cerebro_hydra.agent.memory.fetch import Fetch, FetchManager, FetchRequest
from cerebro_hydra.agent.memory.shard_store import Shard, ShardStore
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.wire.connection import encode
from cerebro_hydra.wire.credentials import Credentials, new_credentials
from cerebro_hydra.wire.messages import ShardRequest
from cerebro_hydra.wire.shards import ClientPool, ShardServer
from tests.agent.standins import SECONDS, empty_store

SIZE = 16 << 20
"""Bytes of a segment, more than the buffers of a connection take."""


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Let references alone free memory: an agent may not collect for minutes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module", params=["plain", "tls"])
def credentials(request: pytest.FixtureRequest) -> Credentials:
    return new_credentials(tls=request.param == "tls")


def becomes(condition: Callable[[], object]) -> bool:
    """Return whether a condition holds before long."""
    deadline = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)  # nobody tells when memory or a connection is free
    return bool(condition())


def publish(shard_store: ShardStore, numbers: int, published: int) -> Any:
    """Announce state 1 of trial 0, and publish its first shards in memory of the pool."""
    state = shard_store.expect(0, 1, shards=numbers)
    for number in range(published):
        segments = {}
        for name in ("frozen", "trainable"):
            buffer = shard_store.segments.allocate(SIZE if name == "trainable" else 64)
            buffer[:] = number
            segments[name] = (digest(buffer), buffer)
        shard_store.put(state, number, Shard(segments, {}))
    return state


@contextmanager
def serving(shard_store: ShardStore, credentials: Credentials) -> Iterator[ShardServer]:
    """Serve a shard store as an agent does."""
    server = ShardServer("127.0.0.1", credentials, lambda asked: shard_store.follow(0, asked.visit))
    shard_store.on_change = server.look_again
    yield server
    server.close()


@contextmanager
def fetching(shard_store: ShardStore, credentials: Credentials) -> Iterator[FetchManager]:
    """Fetch into a shard store as an agent does."""
    folder: Any = None
    pool = ClientPool(credentials, digest)
    manager = FetchManager("me", shard_store, folder, pool.client, lambda trial, visit: None)
    yield manager
    manager.close()


def test_an_owner_keeps_nothing_of_what_a_receiver_left_in_the_middle(
    credentials: Credentials,
) -> None:
    held, here = empty_store(), empty_store()
    stalled, left = threading.Event(), threading.Event()

    def allocate(nbytes: int) -> Any:
        stalled.set()
        assert left.wait(SECONDS)
        return np.empty(nbytes, np.uint8)

    stalling: Any = SimpleNamespace(get=lambda name: None, allocate=allocate)
    here.segments, own = stalling, here.segments
    with serving(held, credentials) as server, fetching(here, credentials) as manager:
        publish(held, 1, 1)
        manager.fetch(FetchRequest(0, 1, 1, "owner", server.uri))
        assert stalled.wait(SECONDS)
        here.segments = own
        (connection,) = server._listener.connections
        assert becomes(lambda: not connection._writable.is_set()), "it is not in the middle"
        manager.drop(0, 1)
        left.set()
        assert becomes(lambda: not server._listener.connections)
        held.withdraw(0, 1)
        assert becomes(lambda: held.segments.pool.leased == 64), "a sender still refers to it"


class HalfOwner(threading.Thread):
    """An owner that sends half of what it offered, and then nothing."""

    def __init__(self, kept: int) -> None:
        super().__init__(daemon=True)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.uri = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._offered = kept
        self.half_sent = threading.Event()
        self.start()

    def run(self) -> None:
        accepted, _ = self._listening.accept()
        lines = accepted.makefile("rb")
        lines.readline()  # the secret
        assert "fetch" in json.loads(lines.readline())
        segments = {"trainable": ("00", self._offered)}
        offer = {"number": 0, "segments": segments, "cursor": {}}
        accepted.sendall(encode("shard", offer))
        assert json.loads(lines.readline()) == {"send": ["trainable"]}
        accepted.sendall(bytes(self._offered // 2))
        self.half_sent.set()
        lines.readline()  # until the receiver leaves
        accepted.close()
        self._listening.close()


def test_a_receiver_keeps_nothing_of_a_fetch_that_is_dropped_in_the_middle() -> None:
    here, owner = empty_store(), HalfOwner(SIZE)
    with fetching(here, new_credentials()) as manager:
        manager.fetch(FetchRequest(0, 1, 1, "owner", owner.uri))
        assert owner.half_sent.wait(SECONDS)
        assert here.segments.pool.leased == SIZE
        manager.drop(0, 1)
        assert becomes(lambda: here.segments.pool.leased == 0), "the fetch still refers to it"
    owner.join(SECONDS)
    assert not owner.is_alive()


def test_what_has_come_may_be_spilled_while_the_rest_is_waited_for() -> None:
    held, here = empty_store(), empty_store(budget=SIZE)
    secret = new_credentials()
    with serving(held, secret) as server, fetching(here, secret) as manager:
        publish(held, 2, 1)
        manager.fetch(FetchRequest(0, 1, 2, "owner", server.uri))
        segment = here.segments._segments[here.wait(0, 1, 0).names["trainable"]]
        assert becomes(lambda: not here.segments.pool.is_shared(segment.buffer))
        here.segments.allocate(SIZE)
        assert segment.buffer is None, "it was not spilled"
        manager.drop(0, 1)


def test_a_fetch_that_is_taken_back_before_it_begins_never_ends_another_one() -> None:
    held, here = empty_store(), empty_store()
    asked = ShardRequest(0, 1, "owner", (0,))

    def ignore(*_: object) -> None:
        """Take no notice."""

    with serving(held, credentials := new_credentials()) as server:
        publish(held, 1, 1)
        pool, folder = ClientPool(credentials, digest), cast(Any, None)
        with pool.client(server.uri) as first:
            list(first.fetch(asked, here.segments.get, here.segments.allocate))
        request = FetchRequest(0, 1, 1, "owner", server.uri)
        taken_back = Fetch(request, here, folder, pool.client, ignore, ignore)
        taken_back.cancel()
        with ThreadPoolExecutor(1) as threads:
            taken_back.start(threads)
        with pool.client(server.uri) as another:
            assert another is first
            taken_back.cancel()
            (shard,) = another.fetch(asked, here.segments.get, here.segments.allocate)
        assert shard.bytes_moved == SIZE + 64
        pool.close()
