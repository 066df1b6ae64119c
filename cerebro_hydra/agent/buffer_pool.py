"""Lends the memory of segments, and lends it again once nobody can read it any more."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from cerebro_hydra.shards.layout import Bytes, aligned

POISON = 0xFF
"""As floats it is NaN."""


class BufferPool:
    """Owns the large buffers of a process. Thread-safe.

    A lease ends by itself with the last array, tensor or memoryview that looks into its memory, so
    memory never has two owners. The next lease of exactly that size gets it, whose pages are warm.
    The pool never owns more bytes than were leased at once.

    Args:
        poison: overwrite what is given back, so that a test sees whoever still reads it.
        allocate: takes memory from the system, aligned as `aligned` does.
    """

    def __init__(self, poison: bool = False, allocate: Callable[[int], Bytes] = aligned) -> None:
        self._poison = poison
        self._allocate = allocate
        self._lock = threading.Lock()
        self._ended: deque[Bytes] = deque()
        self._free: list[Bytes] = []  # the longest unused first
        self._leased = 0
        self._peak = 0

    def lease(self, nbytes: int) -> Bytes:
        """Return writable memory of this size, aligned as `aligned` does, with any content.

        Raises:
            MemoryError: the system has not so much; nothing is lent then.
        """
        with self._lock:
            self._collect()
            leased = self._leased + nbytes
            memory = self._take(nbytes)
            self._shrink(max(self._peak, leased) - nbytes)
            if memory is None:
                memory = self._allocate(nbytes)
            self._leased, self._peak = leased, max(self._peak, leased)
        return np.asarray(Lease(memory, self._give_back))

    def trim(self, nbytes: int) -> None:
        """Give unused memory back to the system until the pool owns this much, if it can."""
        with self._lock:
            self._collect()
            self._shrink(nbytes)

    @staticmethod
    def is_shared(buffer: Bytes) -> bool:
        """Return whether anything but this one view, `lease()[:]`, looks into its memory."""
        return sys.getrefcount(buffer.base) > 2  # the view, and the argument of the call

    @property
    def leased(self) -> int:
        """Return the bytes that are lent."""
        with self._lock:
            self._collect()
            return self._leased

    @property
    def nbytes(self) -> int:
        """Return the bytes that the pool owns, lent or not."""
        with self._lock:
            self._collect()
            return self._leased + sum(memory.nbytes for memory in self._free)

    @property
    def peak(self) -> int:
        """Return the most bytes that were lent at once, which the pool never exceeded."""
        return self._peak

    def _give_back(self, memory: Bytes) -> None:
        # The garbage collector may call this at any moment, even while this thread has the lock.
        if self._poison:
            memory.fill(POISON)
        self._ended.append(memory)

    def _collect(self) -> None:
        while self._ended:
            memory = self._ended.popleft()
            self._leased -= memory.nbytes
            self._free.append(memory)

    def _take(self, nbytes: int) -> Bytes | None:
        for at in reversed(range(len(self._free))):
            if self._free[at].nbytes == nbytes:
                return self._free.pop(at)
        return None

    def _shrink(self, nbytes: int) -> None:
        unused = sum(memory.nbytes for memory in self._free)
        while self._free and self._leased + unused > nbytes:
            unused -= self._free.pop(0).nbytes


class Lease:
    """Is the base of every array on a piece of memory, so that it dies after the last of them.

    Args:
        memory: the piece.
        end: is given it then, on any thread and at any moment.
    """

    def __init__(self, memory: Bytes, end: Callable[[Bytes], None]) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory = memory
        self._end = end

    def __del__(self) -> None:
        self._end(self._memory)
