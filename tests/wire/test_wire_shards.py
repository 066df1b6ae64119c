"""Shards fetched from real servers: bytes, savings, waits that end, errors with words."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.wire.credentials import Credentials, new_credentials
from cerebro_hydra.wire.messages import FetchedShard, ShardKey
from cerebro_hydra.wire.shard_client import ShardClient
from cerebro_hydra.wire.shard_server import ShardServer

GUARD = 60  # seconds; only a hang comes near it
PLAIN = new_credentials()
KEY = ShardKey(trial=4, visit=2, shard=0, incarnation="owner")


@dataclass(frozen=True)
class Published:
    segments: dict[str, tuple[str, Any]]
    cursor: dict[str, Any]


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)


def sha(buffer: np.ndarray) -> str:
    return hashlib.sha256(buffer).hexdigest()


def empty(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, dtype=np.uint8)


@contextmanager
def serving(
    lookup: Callable[[ShardKey], Any], credentials: Credentials = PLAIN
) -> Iterator[ShardServer]:
    server = ShardServer("127.0.0.1", credentials, lookup)
    yield server
    server.close()


@contextmanager
def fetching(client: ShardClient, key: ShardKey = KEY, **options: Any) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(client.fetch, key, (), empty, **options)


class Waiting:
    """A lookup that waits until the shard is published, and says that it waits."""

    def __init__(self) -> None:
        self.began: SimpleQueue[ShardKey] = SimpleQueue()
        self.published = threading.Event()

    def __call__(self, key: ShardKey) -> Published:
        self.began.put(key)
        assert self.published.wait(GUARD)
        return Published({"trainable": ("t", noise(1000))}, {})


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    lookup = Waiting()
    yield lookup
    lookup.published.set()


def test_fifty_megabytes_from_another_process_are_equal_bit_for_bit(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    nbytes = 50_000_000
    uri = peer("owner", credentials, str(nbytes)).hear()["uri"]
    memory = np.zeros(nbytes, dtype=np.uint8)
    shard = ShardClient(uri, credentials).fetch(KEY, (), lambda n: memory[:n])
    assert shard.segments["trainable"].buffer is not None
    assert np.shares_memory(shard.segments["trainable"].buffer, memory)
    assert np.array_equal(memory, noise(nbytes))
    assert shard.cursor == {"step": 3}
    assert (shard.bytes_moved, shard.bytes_saved) == (nbytes, 0)
    assert shard.seconds > 0


@pytest.mark.parametrize("nbytes", [0, 1, 63, (2 << 20) - 1, 2 << 20, (2 << 20) + 1])
def test_any_size_arrives_whole(nbytes: int) -> None:
    data = noise(nbytes)
    with serving(lambda _: Published({"trainable": (sha(data), data)}, {})) as server:
        shard = ShardClient(server.uri, PLAIN, sha).fetch(KEY, (), empty)
    assert np.array_equal(shard.segments["trainable"].buffer, data)


@pytest.mark.parametrize("kind", [bytes, memoryview, lambda data: data.view(np.float32)])
def test_any_contiguous_buffer_can_be_published(kind: Callable[[np.ndarray], Any]) -> None:
    data = noise(4096)
    with serving(lambda _: Published({"trainable": ("t", kind(data))}, {})) as server:
        shard = ShardClient(server.uri, PLAIN).fetch(KEY, (), empty)
    assert np.array_equal(shard.segments["trainable"].buffer, data)


@pytest.mark.parametrize(
    ("have", "moved", "saved"),
    [
        ((), ["frozen", "trainable"], []),
        (("f",), ["trainable"], ["frozen"]),
        (("t", "other"), ["frozen"], ["trainable"]),
        (("f", "t"), [], ["frozen", "trainable"]),
    ],
)
def test_segments_that_the_receiver_has_are_not_sent(
    have: tuple[str, ...], moved: list[str], saved: list[str]
) -> None:
    data = {"frozen": noise(3_000_000), "trainable": noise(1_000_003)[::-1].copy()}
    published = Published({name: (name[0], data[name]) for name in data}, {"epoch": 1})
    allocated: list[int] = []

    def allocate(nbytes: int) -> np.ndarray:
        allocated.append(nbytes)
        return empty(nbytes)

    with serving(lambda _: published) as server:
        shard = ShardClient(server.uri, PLAIN).fetch(KEY, have, allocate)
    assert allocated == [data[name].nbytes for name in moved]
    assert shard.bytes_moved == sum(allocated)
    assert shard.bytes_saved == sum(data[name].nbytes for name in saved)
    for name, segment in shard.segments.items():
        assert (segment.digest, segment.nbytes) == (name[0], data[name].nbytes)
        if name in moved:
            assert np.array_equal(segment.buffer, data[name])
        else:
            assert segment.buffer is None


def test_the_owner_is_asked_for_exactly_the_key() -> None:
    asked: list[ShardKey] = []
    with serving(lambda key: asked.append(key) or Published({}, {})) as server:
        ShardClient(server.uri, PLAIN).fetch(ShardKey(12, 34, 5, "abc"), (), empty)
    assert asked == [ShardKey(12, 34, 5, "abc")]


def test_several_threads_fetch_at_once() -> None:
    data = [noise(3_000_000 + shard) for shard in range(6)]
    gate = threading.Barrier(6)

    def lookup(key: ShardKey) -> Published:
        gate.wait(GUARD)  # passes only if all six are being served together
        return Published({"trainable": (sha(data[key.shard]), data[key.shard])}, {})

    with serving(lookup) as server, ThreadPoolExecutor(6) as pool:
        client = ShardClient(server.uri, PLAIN, sha)
        keys = [ShardKey(0, 1, shard, "owner") for shard in range(6)]
        shards = list(pool.map(lambda key: client.fetch(key, (), empty), keys))
    for shard, expected in zip(shards, data, strict=True):
        assert np.array_equal(shard.segments["trainable"].buffer, expected)


@pytest.mark.parametrize("error", [KeyError, ValueError, TransferError])
def test_a_refusal_reaches_the_receiver_in_the_owners_words(error: type[Exception]) -> None:
    def lookup(key: ShardKey) -> Published:
        raise error(f"incarnation {key.incarnation!r} is not mine; I am 'new'")

    with serving(lookup) as server, pytest.raises(TransferError) as caught:
        ShardClient(server.uri, PLAIN).fetch(KEY, (), empty)
    assert str(caught.value) == (
        f"shard 0 of trial 4 after visit 2 (owner owner) from {server.uri}: "
        "incarnation 'owner' is not mine; I am 'new'"
    )


def test_a_failed_fetch_leaves_the_client_usable() -> None:
    answers: list[Any] = [KeyError("not yet"), Published({"frozen": ("f", noise(10))}, {})]

    def lookup(key: ShardKey) -> Published:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with serving(lookup) as server:
        client = ShardClient(server.uri, PLAIN)
        with pytest.raises(TransferError, match="not yet"):
            client.fetch(KEY, (), empty)
        assert client.fetch(KEY, (), empty).bytes_moved == 10


def test_bytes_with_another_digest_are_refused() -> None:
    data = noise(1000)
    announced = sha(data)
    data[500] ^= 1
    with (
        serving(lambda _: Published({"trainable": (announced, data)}, {})) as server,
        pytest.raises(TransferError, match=f"'trainable' .* announced was {announced}"),
    ):
        ShardClient(server.uri, PLAIN, sha).fetch(KEY, (), empty)


def test_memory_of_another_size_is_refused() -> None:
    with (
        serving(lambda _: Published({"trainable": ("t", noise(10))}, {})) as server,
        pytest.raises(ValueError, match=r"allocate\(10\)"),
    ):
        ShardClient(server.uri, PLAIN).fetch(KEY, (), lambda n: empty(n + 1))


def test_a_waiting_fetch_ends_when_the_shard_is_published(waiting: Waiting) -> None:
    with serving(waiting) as server, fetching(ShardClient(server.uri, PLAIN)) as fetch:
        waiting.began.get(timeout=GUARD)
        assert not fetch.done()
        waiting.published.set()
        assert fetch.result(GUARD).bytes_moved == 1000


def test_waiting_is_not_part_of_the_seconds(waiting: Waiting) -> None:
    with serving(waiting) as server, fetching(ShardClient(server.uri, PLAIN)) as fetch:
        waiting.began.get(timeout=GUARD)
        threading.Event().wait(0.3)  # makes a wait that was counted show; decides nothing
        published = time.perf_counter()
        waiting.published.set()
        assert fetch.result(GUARD).seconds <= time.perf_counter() - published


def test_a_waiting_fetch_ends_when_its_client_cancels(waiting: Waiting) -> None:
    with serving(waiting) as server:
        client = ShardClient(server.uri, PLAIN)
        with fetching(client) as fetch:
            waiting.began.get(timeout=GUARD)
            client.cancel()
            with pytest.raises(Cancelled, match="shard 0 of trial 4"):
                fetch.result(GUARD)
        with pytest.raises(Cancelled):
            client.fetch(KEY, (), empty)


def test_one_of_two_waiting_fetches_can_be_cancelled(waiting: Waiting) -> None:
    with serving(waiting) as server:
        patient, client = ShardClient(server.uri, PLAIN), ShardClient(server.uri, PLAIN)
        with fetching(patient) as kept, fetching(client) as dropped:
            waiting.began.get(timeout=GUARD)
            waiting.began.get(timeout=GUARD)
            client.cancel()
            with pytest.raises(Cancelled):
                dropped.result(GUARD)
            waiting.published.set()
            assert kept.result(GUARD).bytes_moved == 1000


def test_a_fetch_from_a_hung_owner_can_be_cancelled(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    owner = peer("owner", credentials, "1000")
    client = ShardClient(owner.hear()["uri"], credentials)
    os.kill(owner.process.pid, signal.SIGSTOP)
    with fetching(client) as fetch:
        client.cancel()
        with pytest.raises(Cancelled):
            fetch.result(GUARD)


def test_a_waiting_fetch_ends_when_the_server_closes(waiting: Waiting) -> None:
    server = ShardServer("127.0.0.1", PLAIN, waiting)
    with fetching(ShardClient(server.uri, PLAIN)) as fetch:
        waiting.began.get(timeout=GUARD)
        server.close()  # while lookup still waits
        with pytest.raises(TransferError, match="the owner has closed"):
            fetch.result(GUARD)


def test_a_waiting_fetch_ends_when_its_owner_is_killed(peer: Callable[..., Any]) -> None:
    owner = peer("owner", PLAIN, "1000")
    uri = owner.hear()["uri"]
    with fetching(ShardClient(uri, PLAIN), ShardKey(0, 1, 1, "owner")) as fetch:
        assert owner.hear() == {"waiting": 1}
        owner.kill()
        with pytest.raises(TransferError, match=re.escape(uri)):
            fetch.result(GUARD)


def test_a_transfer_ends_when_its_owner_is_killed_in_the_middle(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    nbytes = 200_000_000
    owner = peer("owner", credentials, str(nbytes))
    uri = owner.hear()["uri"]

    def allocate(_: int) -> np.ndarray:
        owner.kill()  # the header is here, most bytes are not
        return empty(nbytes)

    with pytest.raises(TransferError, match=re.escape(uri)):
        ShardClient(uri, credentials).fetch(KEY, (), allocate)


def test_an_owner_closes_though_a_receiver_waits_for_what_never_comes(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    owner = peer("owner", credentials, "1000")
    with fetching(
        ShardClient(owner.hear()["uri"], credentials), ShardKey(0, 1, 9, "owner")
    ) as fetch:
        assert owner.hear() == {"waiting": 9}
        owner.tell("close")
        assert owner.hear() == {"closed": True}
        assert owner.process.wait(GUARD) == 0
        with pytest.raises(TransferError):
            fetch.result(GUARD)


def test_an_owners_process_ends_though_a_receiver_hangs(peer: Callable[..., Any]) -> None:
    owner = peer("owner", PLAIN, "1000")
    receiver = peer("receiver", PLAIN, owner.hear()["uri"], "0")
    assert receiver.hear() == {"asking": True}
    assert receiver.hear() == {"header": True}  # and hangs with an open connection
    os.kill(receiver.process.pid, signal.SIGSTOP)
    owner.tell("close")
    assert owner.hear() == {"closed": True}
    assert owner.process.wait(GUARD) == 0


def test_an_owner_goes_on_after_a_waiting_receiver_was_killed(
    peer: Callable[..., Any], waiting: Waiting
) -> None:
    with serving(waiting) as server:
        killed = peer("receiver", PLAIN, server.uri)
        killed.hear()
        waiting.began.get(timeout=GUARD)
        killed.kill()
        waiting.published.set()
        shard: FetchedShard = ShardClient(server.uri, PLAIN).fetch(KEY, (), empty)
        assert shard.bytes_moved == 1000


def test_an_owner_that_is_not_there_is_named() -> None:
    with serving(lambda _: Published({}, {})) as server:
        uri = server.uri
    with pytest.raises(TransferError, match=re.escape(uri)):
        ShardClient(uri, PLAIN).fetch(KEY, (), empty)
