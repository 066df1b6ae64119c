"""Holds segments by digest: in memory as far as a budget allows, the others on scratch disk."""

from __future__ import annotations

import logging
import mmap
import resource
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np

from cerebro_hydra.agent.buffer_pool import BufferPool
from cerebro_hydra.errors import TransferError
from cerebro_hydra.shards.digest import digest as digest_of
from cerebro_hydra.shards.layout import Bytes

BUDGET_STATES = 3.5
"""The budget of an agent, in states of its largest trial: the one that it trains with its source,
its gradients and what its optimizer makes, and another that comes or goes meanwhile."""

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
    """Holds the bytes of a segment in exactly one place."""

    digest: str
    nbytes: int
    buffer: Bytes | None
    file: IO[bytes] | None = None


class SegmentStore:
    """Keeps segments within a budget by spilling those that were longest unused. Thread-safe.

    A spilled segment lies in a file without a name, which vanishes with this process. Readers get
    a map of it, and the kernel keeps as much of that in memory as there is room for. Where the
    disk does not take it, it stays in memory.

    Args:
        budget: the bytes of memory for segments and for what training needs beside them.
        scratch: a folder on a disk of this machine.
        pool: gives the memory.
    """

    def __init__(self, budget: int, scratch: str, pool: BufferPool) -> None:
        self.pool = pool
        self._budget = budget
        self._scratch = scratch
        self._lock = threading.Lock()
        self._making_room = threading.Lock()
        self._segments: dict[str, _Segment] = {}  # the longest unused first
        self._reserved = 0
        self._can_spill = True

    def allocate(self, nbytes: int) -> Bytes:
        """Return memory for one segment, after others were spilled where the budget asks for it."""
        with self._making_room:
            self._make_room(nbytes)
            buffer = self.pool.lease(nbytes)
            self.pool.trim(self._budget - self._reserved)
            return buffer

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[None]:
        """Leave this much of the budget to memory of others while the body runs."""
        with self._making_room:
            self._reserved += nbytes
            self._make_room(0)
            self.pool.trim(self._budget - self._reserved)
        try:
            yield
        finally:
            with self._making_room:
                self._reserved -= nbytes

    def add(self, digest: str, buffer: Bytes) -> None:
        """Keep a segment, unless an equal one is here."""
        with self._lock:
            self._segments.setdefault(digest, _Segment(digest, buffer.nbytes, buffer))
            self._touch(digest)

    def discard(self, digest: str) -> None:
        """Forget a segment; whoever reads it may go on."""
        with self._lock:
            segment = self._segments.pop(digest, None)
            if segment is not None and segment.file is not None:
                segment.file.close()

    def get(self, digest: str) -> Bytes | None:
        """Return the bytes of a segment, None if it is not here.

        Raises:
            TransferError: the disk did not keep what was spilled.
        """
        with self._lock:
            segment = self._segments.get(digest)
            if segment is None:
                return None
            self._touch(digest)
            if segment.buffer is not None:
                return segment.buffer
            assert segment.file is not None
            memory = mmap.mmap(segment.file.fileno(), segment.nbytes, access=mmap.ACCESS_COPY)
        mapped = np.frombuffer(memory, np.uint8)
        if (found := digest_of(mapped)) != digest:
            raise TransferError(f"segment {digest} has digest {found} on scratch disk")
        return mapped

    def digests(self) -> set[str]:
        """Return the digests of all segments."""
        with self._lock:
            return set(self._segments)

    def _touch(self, digest: str) -> None:
        self._segments[digest] = self._segments.pop(digest)

    def _make_room(self, nbytes: int) -> None:
        excess = self.pool.leased + self._reserved + nbytes - self._budget
        while excess > 0 and self._can_spill and (oldest := self._longest_unused()) is not None:
            excess -= oldest.nbytes  # freed now, or when its last reader is through
            self._spill(oldest)

    def _longest_unused(self) -> _Segment | None:
        with self._lock:
            for segment in self._segments.values():
                if segment.buffer is not None and segment.nbytes >= LEAST_SPILLED:
                    return segment
            return None

    def _spill(self, segment: _Segment) -> None:
        buffer = segment.buffer
        assert buffer is not None, "only this method empties a segment, one caller at a time"
        try:
            file = _written(self._scratch, buffer)
        except OSError as error:
            self._can_spill = False
            _log.warning("trials stay in memory, because scratch takes no more: %s", error)
            return
        with self._lock:
            if self._segments.get(segment.digest) is segment:
                segment.buffer, segment.file = None, file
            else:
                file.close()


def _written(folder: str, buffer: Bytes) -> IO[bytes]:
    """Return an open file without a name that holds these bytes.

    Raises:
        OSError: the disk is full, or too few file descriptors would be left for connections.
    """
    file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
    try:
        if file.fileno() > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
            raise OSError("half of the process's file descriptors are in use (ulimit -n)")
        buffer.tofile(file)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file
