"""Shards fetched from real servers: bytes, savings, waits that end, errors with words."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.errors import Cancelled, TransferError
from cerebro_hydra.wire import shards as shard_server
from cerebro_hydra.wire.credentials import Credentials, new_credentials
from cerebro_hydra.wire.messages import ShardRequest
from cerebro_hydra.wire.shards import ClientPool, DigestDiffers, ShardClient
from tests.wire.owners import Owner, Published, empty, fetch, noise, nothing, request, sha

GUARD = 60  # seconds; only a hang comes near it
PLAIN = new_credentials()
SMALL = Published({"trainable": ("t", noise(1000))})


@contextmanager
def serving(*shards: Published | Exception) -> Iterator[Owner]:
    owner = Owner(PLAIN, *shards)
    yield owner
    owner.server.close()


@contextmanager
def fetching(client: ShardClient, *shards: int) -> Iterator[Future[Any]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(fetch, client, *shards)


@pytest.fixture
def waiting() -> Iterator[Owner]:
    """An owner that has published nothing yet."""
    with serving() as owner:
        yield owner


def test_fifty_megabytes_from_another_process_are_equal_bit_for_bit(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    nbytes = 50_000_000
    uri = peer("owner", credentials, str(nbytes)).hear()["uri"]
    memory = np.zeros(nbytes, dtype=np.uint8)
    (shard,) = fetch(ShardClient(uri, credentials), allocate=lambda n: memory[:n])
    assert np.shares_memory(shard.segments["trainable"][1], memory)
    assert np.array_equal(memory, noise(nbytes))
    assert shard.cursor == {"step": 3}
    assert (shard.bytes_moved, shard.bytes_saved) == (nbytes, 0)
    assert shard.seconds > 0


@pytest.mark.parametrize("nbytes", [0, 1, 63, (2 << 20) - 1, 2 << 20, (2 << 20) + 1])
def test_any_size_arrives_whole(nbytes: int) -> None:
    data = noise(nbytes)
    with serving(Published({"trainable": (sha(data), data)})) as owner:
        (shard,) = fetch(ShardClient(owner.uri, PLAIN, sha))
    assert np.array_equal(shard.segments["trainable"][1], data)


@pytest.mark.parametrize("kind", [bytes, memoryview, lambda data: data.view(np.float32)])
def test_any_contiguous_buffer_can_be_published(kind: Callable[[np.ndarray], Any]) -> None:
    data = noise(4096)
    with serving(Published({"trainable": ("t", kind(data))})) as owner:
        (shard,) = fetch(ShardClient(owner.uri, PLAIN))
    assert np.array_equal(shard.segments["trainable"][1], data)


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

    holding = {digest: empty(1) for digest in have}
    with serving(published) as owner:
        (shard,) = fetch(ShardClient(owner.uri, PLAIN), held=holding.get, allocate=allocate)
    assert allocated == [data[name].nbytes for name in moved]
    assert shard.bytes_moved == sum(allocated)
    assert shard.bytes_saved == sum(data[name].nbytes for name in saved)
    assert list(shard.segments) == list(data)
    for name, (digest, buffer) in shard.segments.items():
        assert digest == name[0]
        if name in moved:
            assert np.array_equal(buffer, data[name])
        else:
            assert buffer is holding[digest]


def test_the_owner_is_asked_for_exactly_what_is_requested() -> None:
    wanted = ShardRequest(12, 34, "abc", (1, 0))
    with serving(Published({}), Published({})) as owner:
        fetched = ShardClient(owner.uri, PLAIN).fetch(wanted, nothing, empty)
        assert [shard.number for shard in fetched] == [1, 0]
        assert owner.asked.get_nowait() == wanted
        assert owner.asked.empty()


def test_shards_come_in_the_order_in_which_they_are_published(waiting: Owner) -> None:
    fetched = ShardClient(waiting.uri, PLAIN).fetch(request(0, 1, 2), nothing, empty)
    for number in (2, 0, 1):
        waiting.publish(number, SMALL)
        assert next(fetched).number == number
    assert list(fetched) == []


def test_several_threads_fetch_at_once(waiting: Owner) -> None:
    data = [noise(3_000_000 + shard) for shard in range(6)]
    pool = ClientPool(PLAIN, sha)

    def fetch_one(number: int) -> Any:
        with pool.client(waiting.uri) as client:
            return fetch(client, number)[0]

    with ThreadPoolExecutor(6) as threads:
        fetches = [threads.submit(fetch_one, number) for number in range(6)]
        for _ in fetches:
            waiting.asked.get(timeout=GUARD)  # all six are being served together
        for number, content in enumerate(data):
            waiting.publish(number, Published({"trainable": (sha(content), content)}))
        shards = [each.result(GUARD) for each in fetches]
    for shard, expected in zip(shards, data, strict=True):
        assert np.array_equal(shard.segments["trainable"][1], expected)


@pytest.mark.parametrize("error", [KeyError, ValueError, TransferError])
def test_a_refusal_reaches_the_receiver_in_the_owners_words(error: type[Exception]) -> None:
    refusal = error("incarnation 'owner' is not mine; I am 'new'")
    with serving(refusal) as owner, pytest.raises(TransferError) as caught:
        fetch(ShardClient(owner.uri, PLAIN))
    assert str(caught.value) == (
        f"shard 0 of trial 4 at state 2 (owner owner) from {owner.uri}: "
        "incarnation 'owner' is not mine; I am 'new'"
    )


def test_a_failed_fetch_leaves_the_pool_usable() -> None:
    with serving(KeyError("not yet")) as owner:
        pool = ClientPool(PLAIN)
        with pytest.raises(TransferError, match="not yet"), pool.client(owner.uri) as client:
            fetch(client)
        owner.publish(0, SMALL)
        with pool.client(owner.uri) as client:
            assert fetch(client)[0].bytes_moved == 1000


def test_an_error_in_the_middle_keeps_what_came_before() -> None:
    with serving(SMALL, TransferError("state 2 of trial 4 was withdrawn here")) as owner:
        fetched = ShardClient(owner.uri, PLAIN).fetch(request(0, 1), nothing, empty)
        assert next(fetched).number == 0
        with pytest.raises(TransferError, match="withdrawn here"):
            next(fetched)


def test_bytes_with_another_digest_are_refused() -> None:
    data = noise(1000)
    announced = sha(data)
    data[500] ^= 1
    with (
        serving(Published({"trainable": (announced, data)})) as owner,
        pytest.raises(TransferError, match=f"'trainable' .* announced was {announced}"),
    ):
        fetch(ShardClient(owner.uri, PLAIN, sha))


def test_memory_of_another_size_is_refused() -> None:
    with serving(SMALL) as owner, pytest.raises(ValueError, match=r"allocate\(1000\)"):
        fetch(ShardClient(owner.uri, PLAIN), allocate=lambda n: empty(n + 1))


def test_waiting_is_not_part_of_the_seconds(waiting: Owner) -> None:
    with fetching(ShardClient(waiting.uri, PLAIN)) as fetched:
        waiting.asked.get(timeout=GUARD)
        threading.Event().wait(0.3)  # makes a wait that was counted show; decides nothing
        published = time.perf_counter()
        waiting.publish(0, SMALL)
        assert fetched.result(GUARD)[0].seconds <= time.perf_counter() - published


def test_one_of_two_waiting_fetches_can_be_cancelled(waiting: Owner) -> None:
    patient, client = ShardClient(waiting.uri, PLAIN), ShardClient(waiting.uri, PLAIN)
    with fetching(patient) as kept, fetching(client) as dropped:
        waiting.asked.get(timeout=GUARD)
        waiting.asked.get(timeout=GUARD)
        client.cancel()
        with pytest.raises(Cancelled, match="shard 0 of trial 4"):
            dropped.result(GUARD)
        assert not kept.done()
        waiting.publish(0, SMALL)
        assert kept.result(GUARD)[0].bytes_moved == 1000
    with pytest.raises(Cancelled):
        fetch(client)


def test_a_fetch_from_a_hung_owner_can_be_cancelled(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    owner = peer("owner", credentials, "1000")
    client = ShardClient(owner.hear()["uri"], credentials)
    os.kill(owner.process.pid, signal.SIGSTOP)
    with fetching(client) as fetched:
        client.cancel()
        with pytest.raises(Cancelled):
            fetched.result(GUARD)


def test_a_waiting_fetch_ends_when_the_server_closes(waiting: Owner) -> None:
    with fetching(ShardClient(waiting.uri, PLAIN)) as fetched:
        waiting.asked.get(timeout=GUARD)
        waiting.server.close()
        with pytest.raises(TransferError, match="the owner has closed"):
            fetched.result(GUARD)


def test_a_transfer_under_way_is_finished_when_the_server_closes() -> None:
    data, closing = noise(50_000_000), threading.Event()

    def allocate(nbytes: int) -> np.ndarray:
        threading.Thread(target=owner.server.close).start()
        while not owner.server._closing:
            closing.wait(0.01)
        return empty(nbytes)

    with serving(Published({"trainable": (sha(data), data)})) as owner:
        (shard,) = fetch(ShardClient(owner.uri, PLAIN, sha), allocate=allocate)
    assert shard.bytes_moved == data.nbytes


def test_a_waiting_fetch_ends_when_its_owner_is_killed(peer: Callable[..., Any]) -> None:
    owner = peer("owner", PLAIN, "1000")
    uri = owner.hear()["uri"]
    with fetching(ShardClient(uri, PLAIN), 1) as fetched:
        assert owner.hear() == {"waiting": 1}
        owner.kill()
        with pytest.raises(TransferError, match=re.escape(uri)):
            fetched.result(GUARD)


def test_a_transfer_ends_when_its_owner_is_killed_in_the_middle(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    nbytes = 200_000_000
    owner = peer("owner", credentials, str(nbytes))
    uri = owner.hear()["uri"]

    def allocate(_: int) -> np.ndarray:
        owner.kill()  # the offer is here, most bytes are not
        return empty(nbytes)

    with pytest.raises(TransferError, match=re.escape(uri)):
        fetch(ShardClient(uri, credentials), allocate=allocate)


def test_an_owner_closes_though_a_receiver_waits_for_what_never_comes(
    credentials: Credentials, peer: Callable[..., Any]
) -> None:
    owner = peer("owner", credentials, "1000")
    with fetching(ShardClient(owner.hear()["uri"], credentials), 9) as fetched:
        assert owner.hear() == {"waiting": 9}
        owner.tell("close")
        assert owner.hear() == {"closed": True}
        assert owner.process.wait(GUARD) == 0
        with pytest.raises(TransferError):
            fetched.result(GUARD)


def test_an_owners_process_ends_though_a_receiver_hangs(peer: Callable[..., Any]) -> None:
    owner = peer("owner", PLAIN, "1000")
    receiver = peer("receiver", PLAIN, owner.hear()["uri"], "0")
    assert receiver.hear() == {"asking": True}
    assert receiver.hear() == {"offered": True}  # and hangs with an open connection
    os.kill(receiver.process.pid, signal.SIGSTOP)
    owner.tell("close")
    assert owner.hear() == {"closed": True}
    assert owner.process.wait(GUARD) == 0


def test_a_receiver_that_takes_nothing_is_dropped(
    peer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was offered must not stay in memory for as long as it likes to hang."""
    monkeypatch.setattr(shard_server, "_STALL_SECONDS", 0.5)
    with serving(Published({"trainable": ("t", noise(50_000_000))})) as owner:
        receiver = peer("receiver", PLAIN, owner.uri, "0")
        receiver.hear()
        assert receiver.hear() == {"offered": True}
        os.kill(receiver.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + GUARD
        while owner.server._listener.connections:
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)


def test_an_owner_goes_on_after_a_waiting_receiver_was_killed(
    peer: Callable[..., Any], waiting: Owner
) -> None:
    killed = peer("receiver", PLAIN, waiting.uri)
    killed.hear()
    waiting.asked.get(timeout=GUARD)
    killed.kill()
    waiting.publish(0, SMALL)
    assert fetch(ShardClient(waiting.uri, PLAIN))[0].bytes_moved == 1000


def test_an_owner_that_is_not_there_is_named() -> None:
    with serving() as owner:
        uri = owner.uri
    with pytest.raises(TransferError, match=re.escape(uri)):
        fetch(ShardClient(uri, PLAIN))


def test_an_owner_says_what_its_bytes_have_become_since_they_were_published() -> None:
    content = noise(100_000)
    with serving(Published({"trainable": (sha(content), content)})) as owner:
        client = ShardClient(owner.uri, PLAIN, sha)
        assert fetch(client)[0].bytes_moved == len(content)
        assert client.verify(request(0)) == {0: {"trainable": sha(content)}}
        announced, content[7] = sha(content), content[7] ^ 1
        with pytest.raises(DigestDiffers, match="announced was") as caught:
            fetch(client)
        found = (caught.value.shard, caught.value.segment, caught.value.announced)
        assert found == (0, "trainable", announced)
        there = ShardClient(owner.uri, PLAIN, sha).verify(request(0))
        assert there == {0: {"trainable": sha(content)}} != {0: {"trainable": announced}}
