"""Stores that show late readers or refuse copies, and peers that answer when a test lets them."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.agent.memory.shard_store import Shard, ShardStore
from cerebro_hydra.plan.queues.pick import oldest_first
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.wire.messages import FetchedShard, ShardRequest

SECONDS = 60.0
"""After this a wait counts as one that never ends."""


def empty_store(budget: int = 1 << 30) -> ShardStore:
    """Return a store whose memory shows whoever reads it too late."""
    pool = BufferPool(poison=True)
    return ShardStore(SegmentStore(budget, tempfile.gettempdir(), pool, idle_queues()))


def idle_queues() -> WorkerState:
    """Return the queues of a worker that has nothing to do."""
    return WorkerState([None], None, oldest_first)


def shard(frozen: str, trainable: str, size: int = 8) -> Shard:
    buffers = {name: np.zeros(size, np.uint8) for name in ("frozen", "trainable")}
    digests = {"frozen": frozen, "trainable": trainable}
    segments = {name: (digests[name], buffer) for name, buffer in buffers.items()}
    return Shard(segments, {"step": 1})


def refuse_copies(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let memory that has room for an audit's copies refuse them all the same."""
    looking: set[int] = set()
    has_room, allocate = SegmentStore.has_room, SegmentStore.allocate

    def asked(self: SegmentStore, nbytes: int) -> bool:
        looking.add(threading.get_ident())
        return has_room(self, nbytes)

    def refused(self: SegmentStore, nbytes: int) -> Any:
        if threading.get_ident() in looking:
            looking.clear()
            raise error
        return allocate(self, nbytes)

    monkeypatch.setattr(SegmentStore, "has_room", asked)
    monkeypatch.setattr(SegmentStore, "allocate", refused)


class Peer:
    """An owner that answers when the test lets it: with a shard of `fill` bytes, or an error."""

    def __init__(self, fill: int) -> None:
        self.fill = fill
        self.error: Exception | None = None
        self.asked = threading.Event()
        self.answer = threading.Event()
        self.left = threading.Event()

    def fetch(
        self, request: ShardRequest, held: Any, allocate: Callable[[int], Any]
    ) -> Iterator[FetchedShard]:
        self.asked.set()
        assert self.answer.wait(SECONDS)
        if self.error is not None:
            raise self.error
        segments = {}
        for name in ("frozen", "trainable"):
            buffer = allocate(8)
            buffer[:] = self.fill
            segments[name] = (digest(buffer), buffer)
        yield FetchedShard(0, segments, {"step": 1}, 16, 0, 0.0)

    def cancel(self) -> None:
        """Go on waiting: the answer comes late."""

    @contextmanager
    def lent(self) -> Iterator[Peer]:
        """Be one fetch's, and say when it has ended."""
        try:
            yield self
        finally:
            self.left.set()
