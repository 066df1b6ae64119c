"""What an agent holds: waits end as they should, and equal bytes are kept once."""

from __future__ import annotations

import threading

import pytest

from cerebro_hydra.agent.memory.shard_store import ShardStore
from cerebro_hydra.errors import TransferError
from tests.agent.standins import empty_store, shard


class Waiter(threading.Thread):
    """Waits for a shard on a thread, as a peer's request does."""

    def __init__(self, shard_store: ShardStore, *key: int, given_up=lambda: False) -> None:
        super().__init__(daemon=True)
        self.result: object = None
        self._wait = lambda: shard_store.wait(*key, given_up)
        self.start()

    def run(self) -> None:
        try:
            self.result = self._wait()
        except TransferError as error:
            self.result = error

    def outcome(self) -> object:
        self.join(20)
        assert not self.is_alive(), "the wait did not end"
        return self.result


def test_a_wait_that_comes_before_the_announcement_gets_the_shard() -> None:
    shard_store = empty_store()
    waiter = Waiter(shard_store, 0, 3, 1)
    state = shard_store.expect(0, 3, shards=2)
    shard_store.put(state, 0, shard("f0", "t0"))
    assert not shard_store.whole(0, 3)
    shard_store.put(state, 1, shard("f1", "t1"))
    assert shard_store.whole(0, 3)
    assert waiter.outcome().digests == ("f1", "t1")


def test_withdrawing_a_state_ends_waits_for_it() -> None:
    shard_store = empty_store()
    shard_store.expect(0, 3, shards=1)
    looked = threading.Event()
    waiter = Waiter(shard_store, 0, 3, 0, given_up=lambda: looked.set() or False)
    assert looked.wait(20)  # it has seen the announced state, and holds the lock until it waits
    shard_store.withdraw(0, 3)
    assert "withdrawn" in str(waiter.outcome())


def test_a_wait_can_be_given_up() -> None:
    shard_store = empty_store()
    cancelled = threading.Event()
    waiter = Waiter(shard_store, 0, 1, 0, given_up=cancelled.is_set)
    cancelled.set()
    shard_store.wake()
    assert "given up" in str(waiter.outcome())


def test_equal_segments_are_kept_once_for_all_trials() -> None:
    shard_store = empty_store()
    for trial in range(3):
        shard_store.put(
            shard_store.expect(trial, 0, shards=1), 0, shard("backbone", f"head-{trial}")
        )
    buffers = [shard_store.wait(trial, 0, 0).segments["frozen"][1] for trial in range(3)]
    assert len({buffer.ctypes.data for buffer in buffers}) == 1
    assert sorted(shard_store.segments.digests()) == ["backbone", "head-0", "head-1", "head-2"]


def test_dropping_a_state_keeps_what_others_name_and_what_is_frozen() -> None:
    shard_store = empty_store()
    for visit in (1, 2):
        state = shard_store.expect(0, visit, shards=2)
        shard_store.put(state, 0, shard("f0", "unchanged"))
        shard_store.put(state, 1, shard("f1", f"changed-{visit}"))
    shard_store.withdraw(0, 1)
    assert sorted(shard_store.segments.digests()) == ["changed-2", "f0", "f1", "unchanged"]
    shard_store.withdraw(0, 2)
    assert sorted(shard_store.segments.digests()) == ["f0", "f1"]


def test_a_shard_of_a_withdrawn_state_is_not_published() -> None:
    shard_store = empty_store()
    state = shard_store.expect(0, 5, shards=1)
    shard_store.withdraw(0, 5)
    shard_store.put(state, 0, shard("f", "t"))
    assert not shard_store.knows(0, 5)
    assert list(shard_store.segments.digests()) == []


def test_a_state_that_is_announced_anew_is_another_one() -> None:
    shard_store = empty_store()
    first = shard_store.expect(0, 3, shards=1)
    looked = threading.Event()
    waiter = Waiter(shard_store, 0, 3, 0, given_up=lambda: looked.set() or False)
    assert looked.wait(20)
    second = shard_store.expect(0, 3, shards=1)
    assert "withdrawn" in str(waiter.outcome())
    shard_store.put(first, 0, shard("f", "void"))
    shard_store.retract(first)
    shard_store.put(second, 0, shard("f", "redone"))
    assert shard_store.wait(0, 3, 0).digests == ("f", "redone")


def test_a_state_that_is_announced_anew_frees_the_segments_of_the_void_one() -> None:
    shard_store = empty_store()
    shard_store.put(shard_store.expect(0, 3, shards=1), 0, shard("f", "void"))
    shard_store.expect(0, 3, shards=1)
    assert list(shard_store.segments.digests()) == ["f"]


def test_giving_up_needs_no_announcement() -> None:
    with pytest.raises(TransferError, match="given up"):
        empty_store().wait(1, 2, 0, lambda: True)
