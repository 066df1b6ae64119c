"""Peers, builders and engines that do what a test tells them, and nothing else."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cerebro_hydra.agent.device.messages import Done, RunOrder
from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.agent.memory.shard_store import Shard, ShardStore
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.shards.admission.profile import ShardBytes, TrialProfile
from cerebro_hydra.shards.engine.layout import Segments
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.wire.messages import FetchedShard, ShardRequest

SECONDS = 60.0
"""After this a wait counts as one that never ends."""


def empty_store(budget: int = 1 << 30) -> ShardStore:
    """Return a store whose memory shows whoever reads it too late."""
    return ShardStore(SegmentStore(budget, tempfile.gettempdir(), BufferPool(poison=True)))


def shard(frozen: str, trainable: str, size: int = 8) -> Shard:
    buffers = {name: np.zeros(size, np.uint8) for name in ("frozen", "trainable")}
    digests = {"frozen": frozen, "trainable": trainable}
    segments = {name: (digests[name], buffer) for name, buffer in buffers.items()}
    return Shard(segments, {"step": 1})


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


class StandInTrials:
    """Opens runs of one trial of one shard, whose step adds one; hooks run where they are named."""

    def __init__(self, **hooks: Callable[[], object]) -> None:
        self._hooks = hooks

    def hook(self, name: str) -> None:
        """Do what a test wants done here."""
        self._hooks.get(name, lambda: None)()

    def profile(self, trial: Any) -> TrialProfile:
        self.hook("build")
        return TrialProfile((ShardBytes(8, 8, 0, False),), (), False)

    def forget(self, trial: int) -> None:
        """Keep nothing of a trial."""

    def open(self, order: RunOrder) -> StandInRun:
        return StandInRun(self)


class StandInRun:
    """Adds one to a shard in its update."""

    stays = resident = True

    def __init__(self, trials: StandInTrials) -> None:
        self._trials = trials
        self._slots: dict[int, Segments] = {}

    def moved(self, slots: Segments) -> Segments:
        return slots

    def load(self, shard: int, slots: Segments, cursor: Any) -> None:
        self._slots[shard] = slots

    def unload(self, shard: int) -> tuple[Any, bool]:
        return {"step": 2}, False

    def perform(self, task: Action, then: Any = None) -> Done:
        if task.kind is ActionKind.F:
            self._trials.hook("train")
        if task.kind is ActionKind.U:
            self._slots[task.shard]["trainable"].add_(1)
        losses = {task.microbatch or 0: (0.2, 5)} if task.kind is ActionKind.B else {}
        return Done(task, losses=losses)

    def close(self) -> None:
        self._slots.clear()

    def cancel(self) -> None:
        self._slots.clear()
        self._trials.hook("told")
