"""Holds segments by digest: in memory as far as a budget allows, the others on scratch disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cerebro_hydra.agent.memory.pool import BufferPool, ScratchFile
from cerebro_hydra.errors import TransferError
from cerebro_hydra.plan.queues.ledger import StateName
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.shards.engine.layout import Bytes
from cerebro_hydra.shards.heap import trim_heap
from cerebro_hydra.storage.digest import digest as digest_of

BUDGET_STATES = 3.75
"""The budget of an agent, in states of its largest trial: the state that it trains, the one before
it, another that comes or goes meanwhile, and two thirds for the gradients of Adam."""

LEAST_BUDGET = 256 << 20
"""Bytes that an agent may hold however small its trials are."""

LEAST_SPILLED = 1 << 20
"""Bytes below which a segment is not worth a file."""

_log = logging.getLogger(__name__)


def budget_of(largest_state: int) -> int:
    """Return the budget in bytes of an agent whose largest trial has a state of this size."""
    return max(LEAST_BUDGET, int(BUDGET_STATES * largest_state))


@dataclass(eq=False)
class _Segment:
    """Holds the bytes of a segment in memory, in a file, or in both."""

    digest: str
    buffer: Bytes | None
    file: ScratchFile | None = None


class SegmentStore:
    """Keeps segments within a budget by spilling those that the plan names. Thread-safe.

    A spilled segment lies in a file without a name, which vanishes with this process, and is read
    back when somebody wants it. What is being read or trained is not spilled. Where the disk takes
    no more, segments stay in memory.

    Whoever needs memory asks the plan on its own thread, and moves there what the plan says; so
    nobody waits for the thread of the queues.

    Args:
        budget: the bytes of memory for segments and for what training needs beside them.
        scratch: a folder on a disk of this machine.
        pool: gives the memory.
        queues: those of the worker; they are told what is kept, and say what goes.
    """

    def __init__(self, budget: int, scratch: str, pool: BufferPool, queues: WorkerState) -> None:
        self.pool = pool
        self.queues = queues
        self._budget = budget
        self.scratch = scratch
        self.lock = threading.Lock()  # of the table and the queues; nobody has it while bytes move
        self._moving = threading.RLock()  # of what is moved between memory and disk; taken first
        self._segments: dict[str, _Segment] = {}
        self._reserved = 0
        self._disk_is_full = False

    def raise_budget(self, budget: int) -> None:
        """Allow this many bytes, unless more are allowed already."""
        with self._moving:
            self._budget = max(self._budget, budget)

    def allocate(self, nbytes: int) -> Bytes:
        """Return memory for one segment, after others were spilled where the budget asks for it."""
        with self._moving:
            self._make_room(nbytes)
            buffer = self.pool.lease(nbytes)
            self._trim()
            return buffer

    def has_room(self, nbytes: int) -> bool:
        """Return whether this much more fits into the budget, once others are spilled for it."""
        with self._moving:
            self._make_room(nbytes)
            return self.pool.leased + self._reserved + nbytes <= self._budget

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[None]:
        """Leave this much of the budget to memory of others while the body runs."""
        with self._moving:
            self._reserved += nbytes
            self._make_room(0)
            self._trim()
        try:
            yield
        finally:
            trim_heap(nbytes)
            with self._moving:
                self._reserved -= nbytes

    def keep(self, name: StateName, shard: int, segments: Mapping[str, tuple[str, Bytes]]) -> None:
        """Keep the segments of a shard of a state, but for those of which equal ones are here."""
        sizes = {part: (digest, buffer.nbytes) for part, (digest, buffer) in segments.items()}
        with self.lock:
            for digest, buffer in segments.values():
                self._segments.setdefault(digest, _Segment(digest, buffer[:]))
            self.queues.ledger.keep(name, shard, sizes)

    def take(self, name: StateName, shard: int) -> None:
        """Note that another worker takes a shard of a state, which seldom is needed again then."""
        with self.lock:
            self.queues.ledger.take(name, shard)

    def forget_state(self, name: StateName) -> None:
        """Forget that segments make up a state; they stay until they are discarded."""
        with self.lock:
            self.queues.ledger.forget_state(name)

    def discard(self, digest: str) -> None:
        """Forget a segment; whoever reads it may go on."""
        with self.lock:
            self._segments.pop(digest, None)
            self.queues.ledger.drop_kept(digest)
        self._trim()

    def get(self, digest: str) -> Bytes | None:
        """Return the bytes of a segment, None if it is not here.

        Raises:
            TransferError: the disk did not keep what was spilled.
        """
        with self.lock:
            if (segment := self._segments.get(digest)) is None:
                return None
            self.queues.ledger.use(digest)
            if (buffer := segment.buffer) is not None:
                return buffer[:]
        with self._moving:
            return self._read_back(segment)

    def is_altered(self, digest: str) -> bool:
        """Return whether somebody has written to a segment that is in memory."""
        with self.lock:
            segment = self._segments.get(digest)
            buffer = None if segment is None else segment.buffer
        return buffer is not None and digest_of(buffer) != digest

    def read(self, digest: str) -> Bytes:
        """Return the bytes of a segment.

        Raises:
            TransferError: it is not here any more, or the disk did not keep it.
        """
        if (buffer := self.get(digest)) is None:
            raise TransferError(f"segment {digest} was dropped here meanwhile")
        return buffer

    def digests(self) -> set[str]:
        """Return the digests of all segments."""
        with self.lock:
            return set(self._segments)

    def _trim(self) -> None:
        self.pool.trim(self._budget - self._reserved)

    def _make_room(self, nbytes: int) -> None:
        while (lacking := self.pool.leased + self._reserved + nbytes - self._budget) > 0:
            with self.lock:
                idle = {each.digest for each in self._segments.values() if self._is_idle(each)}
                going = [self._segments[name] for name in self.queues.evict_kept(lacking, idle)]
            if not (going and all(map(self._spill, going))):
                return

    def _is_idle(self, segment: _Segment) -> bool:
        """Return whether a segment is in memory, may go to disk, and is read by nobody."""
        if segment.buffer is None or segment.buffer.nbytes < LEAST_SPILLED:
            return False
        return not self.pool.is_shared(segment.buffer)

    def _spill(self, segment: _Segment) -> bool:
        """Let a segment go to disk; return whether the disk has taken it."""
        if segment.file is None and segment.buffer is not None:
            try:
                segment.file = ScratchFile(self.scratch, segment.buffer)
            except OSError as error:
                if not self._disk_is_full:
                    _log.warning("states stay in memory while scratch takes no more: %s", error)
                self._disk_is_full = True
                return False
            self._disk_is_full = False
        self._place(segment, None)
        return True

    def _place(self, segment: _Segment, buffer: Bytes | None) -> None:
        """Have a segment in memory, or on disk alone."""
        with self.lock:
            segment.buffer = buffer
            if self._segments.get(segment.digest) is segment:
                self.queues.ledger.move_kept(segment.digest, in_dram=buffer is not None)

    def _read_back(self, segment: _Segment) -> Bytes:
        if segment.buffer is not None:  # another thread was first
            return segment.buffer[:]
        assert segment.file is not None, "a segment without a buffer has a file"
        buffer = self.allocate(segment.file.nbytes)
        try:
            segment.file.read_into(buffer)
        except OSError as error:
            why = f"can't read segment {segment.digest} from scratch disk: {error}"
            raise TransferError(why) from error
        if (found := digest_of(buffer)) != segment.digest:
            raise TransferError(f"segment {segment.digest} has digest {found} on scratch disk")
        self._place(segment, buffer[:])
        return buffer
