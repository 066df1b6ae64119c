"""Memory has one owner, whatever is lent, read and given back in which order."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.shards.engine.layout import ALIGNMENT
from tests.examples import examples

POISON = 0xFF
SIZES = (64, 1024, 1000, 4096)


def readers_of(buffer: np.ndarray) -> list[Any]:
    """Return what looks into the memory in the ways that an agent does."""
    half = buffer[: buffer.nbytes // 2]
    tensor = torch.from_numpy(buffer[8:])
    return [half, tensor.as_strided((2,), (1,)).numpy(), buffer.data, tensor.detach().numpy()]


class Leases(RuleBasedStateMachine):
    """Lend, read, and give back in any order; each owner writes a mark of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(poison=True)
        self.owned: list[tuple[np.ndarray, int]] = []
        self.read: list[tuple[Any, int]] = []
        self.marks = 0
        self.needed = 0

    @rule(nbytes=st.sampled_from(SIZES))
    def lease(self, nbytes: int) -> None:
        buffer = self.pool.lease(nbytes)
        assert buffer.nbytes == nbytes
        assert buffer.ctypes.data % ALIGNMENT == 0
        self.marks = self.marks % (POISON - 1) + 1
        buffer[:] = self.marks
        self.owned.append((buffer, self.marks))
        self.needed = max(self.needed, self.pool.leased)

    @precondition(lambda self: self.owned)
    @rule(which=st.integers(0, 99), how=st.integers(0, 3))
    def read_on(self, which: int, how: int) -> None:
        buffer, mark = self.owned[which % len(self.owned)]
        self.read.append((readers_of(buffer)[how], mark))

    @precondition(lambda self: self.owned)
    @rule(which=st.integers(0, 99))
    def release(self, which: int) -> None:
        del self.owned[which % len(self.owned)]

    @precondition(lambda self: self.read)
    @rule(which=st.integers(0, 99))
    def stop_reading(self, which: int) -> None:
        del self.read[which % len(self.read)]

    @rule(nbytes=st.integers(0, 1 << 14))
    def trim(self, nbytes: int) -> None:
        self.pool.trim(nbytes)
        assert self.pool.nbytes <= max(nbytes, self.pool.leased)

    @invariant()
    def each_sees_its_own_mark(self) -> None:
        for reader, mark in (*self.owned, *self.read):
            assert bytes(memoryview(reader)) == bytes([mark]) * len(reader)

    @invariant()
    def no_more_is_owned_than_was_needed_at_once(self) -> None:
        assert self.pool.nbytes <= self.needed
        assert self.pool.peak == self.needed
        assert self.pool.leased >= sum(buffer.nbytes for buffer, _ in self.owned)

    def teardown(self) -> None:
        self.owned.clear()
        self.read.clear()
        assert self.pool.leased == 0


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=examples(100), stateful_step_count=20)


def test_reading_what_was_given_back_is_seen() -> None:
    pool = BufferPool(poison=True)
    buffer = pool.lease(4096)
    buffer[:] = 1
    address = buffer.ctypes.data
    del buffer
    again = pool.lease(4096)
    assert again.ctypes.data == address
    assert (again == POISON).all()
    assert torch.from_numpy(again).view(torch.float32).isnan().all()


def test_memory_that_the_system_refuses_does_not_count_as_lent() -> None:
    pool = BufferPool()
    kept = pool.lease(4096)
    with pytest.raises(MemoryError):
        pool.lease(1 << 60)
    assert pool.leased == pool.nbytes == pool.peak == kept.nbytes


def test_a_lease_may_end_while_the_garbage_collector_runs_in_the_pool() -> None:
    pool = BufferPool()

    class Circle:
        def __init__(self) -> None:
            self.me, self.buffer = self, pool.lease(64)

    for _ in range(50):
        Circle()
        with pool._lock:  # as if a collection began in the middle of `lease`
            gc.collect(0)
    assert pool.leased == 0


def test_threads_share_a_pool() -> None:
    pool = BufferPool(poison=True)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            buffer = pool.lease(4096)
            buffer[:] = mark
            if not (buffer == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.leased == 0
    assert pool.nbytes <= pool.peak <= 2 * 4 * 4096  # each holds one while it gets the next
