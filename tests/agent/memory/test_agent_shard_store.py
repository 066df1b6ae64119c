"""What an agent holds: waits end as they should, and equal bytes are kept once."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import numpy as np
import pytest

from cerebro_hydra.agent.memory.checkpoint import CheckpointWriter, write_segments
from cerebro_hydra.agent.memory.fetch import StateAltered
from cerebro_hydra.agent.memory.shard_store import Shard, ShardHome, ShardStore
from cerebro_hydra.errors import TransferError
from cerebro_hydra.plan.messages.events import CheckpointFailed
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_folder import RunFolder
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
    for state in (1, 2):
        held = shard_store.expect(0, state, shards=2)
        shard_store.put(held, 0, shard("f0", "unchanged"))
        shard_store.put(held, 1, shard("f1", f"changed-{state}"))
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
    shard_store.put(first, 0, shard("void f", "void"))
    assert shard_store.segments.digests() == set(), "nobody would ever let go of them"
    shard_store.retract(first)
    shard_store.put(second, 0, shard("f", "redone"))
    assert shard_store.wait(0, 3, 0).digests == ("f", "redone")


def test_a_state_that_is_announced_anew_frees_the_segments_of_the_void_one() -> None:
    shard_store = empty_store()
    shard_store.put(shard_store.expect(0, 3, shards=1), 0, shard("f", "void"))
    shard_store.expect(0, 3, shards=1)
    assert list(shard_store.segments.digests()) == ["f"]


# ---------------------------------------------------------------------- the home of a shard


SIZES = {"trainable": 3000, "gradients": 1000}


def home_of_ones(store: ShardStore) -> ShardHome:
    """Return the home of a shard whose bytes are ones."""
    state, named = store.expect(0, 0, 1), {}
    for name in ("frozen", "trainable"):
        buffer = store.segments.allocate(3000)
        buffer[:] = 1
        named[name] = digest(buffer), buffer
    store.put(state, 0, Shard(named, {}))
    held = store.follow(0, 0)(0)
    assert held is not None
    return ShardHome(held, store.segments)


def test_a_home_of_which_a_part_is_written_has_the_rest_as_it_was() -> None:
    home = home_of_ones(empty_store())
    (slab,) = home.room_for({"gradients": 1000}, in_part=True).values()
    slab[:] = 5
    home.changed({"step": 0}, has_gradients=True, trained=False)
    assert set(home.slabs["trainable"]) == {1}
    (slab,) = home.room_for({"trainable": 3000}, in_part=True).values()
    slab[:10] = 7
    home.changed({"step": 0}, has_gradients=True)
    assert home.slabs["trainable"].tolist() == [7] * 10 + [1] * 2990
    home.to_disk()
    home.to_dram()
    assert home.published().segments["trainable"][1].tolist() == [7] * 10 + [1] * 2990
    assert set(home.slabs["gradients"]) == {5}


def test_a_home_gives_its_memory_back_on_disk_and_has_its_bytes_again(tmp_path: Path) -> None:
    store = empty_store()
    home = home_of_ones(store)
    pool = store.segments.pool
    before = pool.leased
    for number, slab in enumerate(home.room_for(SIZES).values()):
        slab[:] = 7 + number
    del slab
    home.changed({"step": 1}, has_gradients=True)
    assert pool.leased == before + sum(SIZES.values())
    home.to_disk()
    assert pool.leased == before
    home.to_dram()
    assert pool.leased == before + sum(SIZES.values())
    found = {name: set(np.unique(slab).tolist()) for name, slab in home.slabs.items()}
    assert found == {"frozen": {1}, "trainable": {7}, "gradients": {8}}
    home.changed({"step": 2}, has_gradients=False)
    assert pool.leased == before + SIZES["trainable"], "gradients need no place any more"
    home.leave_dram()
    assert pool.leased == before


# ---------------------------------------------------------------------- what is written of a state


def test_a_state_that_is_not_here_is_an_error(tmp_path: Path) -> None:
    folder = RunFolder(LocalStore(str(tmp_path)), "run")
    with pytest.raises(TransferError, match="state 3 of trial 0"):
        write_segments(folder, empty_store(), 0, 3)
    assert folder.states(0) == []


def test_an_agent_that_wakes_up_late_changes_no_state(tmp_path: Path) -> None:
    """Its trial was trained again without it, and the state of that name is another one now."""
    folder, store = RunFolder(LocalStore(str(tmp_path)), "run"), empty_store()
    again = {"trial": 0, "state": 3, "shards": []}
    folder.write_state(0, 3, again)
    words = {name: np.frombuffer(name.encode(), np.uint8) for name in ("frozen", "trainable")}
    late = {name: (digest(word), word) for name, word in words.items()}
    store.put(store.expect(0, 3, 1), 0, Shard(late, {"step": 1}))
    written = write_segments(folder, store, 0, 3)
    assert folder.read_state(0, 3)["shards"] == []
    assert all(folder.has_object(name) for name, _ in late.values())
    assert written["shards"][0]["cursor"] == {"step": 1}


def test_what_was_written_to_after_it_was_published_is_not_stored(tmp_path: Path) -> None:
    """Its name would be that of other bytes, which nobody could read."""
    folder, store = RunFolder(LocalStore(str(tmp_path)), "run"), empty_store()
    words = {name: np.array([1, len(name)], np.uint8) for name in ("frozen", "trainable")}
    segments = {name: (digest(word), word) for name, word in words.items()}
    state = store.expect(0, 3, 1)
    store.put(state, 0, Shard(segments, {"step": 1}))
    assert store.altered(state) == []
    words["trainable"][0] = 7
    assert store.altered(state) == [0]
    with pytest.raises(StateAltered, match="'trainable' of shard 0 was written to after it was"):
        write_segments(folder, store, 0, 3)
    assert not folder.has_object(segments["trainable"][0])


def test_what_was_written_to_is_told_at_once_and_not_tried_again(tmp_path: Path) -> None:
    """It stays as it is; a store that refuses a file is asked again for a minute."""
    folder, store = RunFolder(LocalStore(str(tmp_path)), "run"), empty_store()
    word = np.zeros(8, np.uint8)
    segments = {name: (digest(word), word) for name in ("frozen", "trainable")}
    store.put(store.expect(0, 3, 1), 0, Shard(segments, {"step": 1}))
    word[0] = 7
    told: queue.Queue[CheckpointFailed] = queue.Queue()
    writer = CheckpointWriter("a", folder, store, lambda message: None, told.put)
    writer.write(0, 3)
    failed = told.get(timeout=20)
    writer.close()
    assert failed.altered and "was written to after it was published" in failed.error
