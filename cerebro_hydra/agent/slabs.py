"""Slabs are memory that the processes of a worker share: host memory with a file descriptor.

An agent's pool takes its memory from ``Slabs``, so whatever lies in it, a received segment as well
as a spilled shard, reaches a device's process by number. The memory has no name in any file system
and vanishes with the last process that maps it, however that ends.
"""

from __future__ import annotations

import mmap
import os
import resource
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cerebro_hydra.shards.layout import Bytes


@dataclass(frozen=True, slots=True)
class SlabName:
    """Names the first bytes of a slab to another process."""

    number: int
    nbytes: int


class Slabs:
    """Makes shared memory, and finds the slab that a buffer lies in. Thread-safe.

    Each of `on_freed` is given the number of a slab that is there no more, at any moment. Every
    slab takes two file descriptors, so this process may open as many as the system allows.
    """

    def __init__(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._lock = threading.RLock()  # a finalizer may run while this thread has it
        self._made = 0
        self._slabs: dict[int, tuple[int, int]] = {}  # address to number and file descriptor
        self.on_freed: list[Callable[[int], object]] = []

    def allocate(self, nbytes: int) -> Bytes:
        """Return zeroed memory that begins on a page.

        Raises:
            MemoryError: the system has not so much, or no file descriptor is left.
        """
        try:
            file = os.memfd_create("cerebro-hydra-slab")
            os.ftruncate(file, max(nbytes, 1))
            memory = np.frombuffer(mmap.mmap(file, max(nbytes, 1)), np.uint8)[:nbytes]
        except OSError as error:
            raise MemoryError(f"can't share {nbytes} bytes of memory: {error}") from error
        address = memory.ctypes.data
        with self._lock:
            self._slabs[address] = self._made, file
            self._made += 1
        weakref.finalize(memory.base, self._free, address).atexit = False
        return memory

    def name_of(self, buffer: Bytes) -> SlabName:
        """Return the name of a buffer that begins where its slab does."""
        with self._lock:
            return SlabName(self._slabs[buffer.ctypes.data][0], buffer.nbytes)

    def file_of(self, buffer: Bytes) -> int:
        """Return the file descriptor of the slab that a buffer lies in."""
        with self._lock:
            return self._slabs[buffer.ctypes.data][1]

    def _free(self, address: int) -> None:
        with self._lock:
            number, file = self._slabs.pop(address)
        os.close(file)
        for tell in tuple(self.on_freed):
            tell(number)


class MappedSlabs:
    """Maps the slabs of another process, each of them once.

    Args:
        mapped: is given each, and returns it as it is to be used.
    """

    def __init__(self, mapped: Callable[[Bytes], Bytes]) -> None:
        self._slabs: dict[int, Bytes] = {}
        self._mapped = mapped

    def map(self, number: int, file: int) -> None:
        """Map a slab and close its file descriptor."""
        memory = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        os.close(file)
        self._slabs[number] = self._mapped(memory)

    def forget(self, number: int) -> None:
        """Unmap a slab, if it was mapped, as soon as nobody looks into it."""
        self._slabs.pop(number, None)

    def find(self, name: SlabName) -> Bytes:
        """Return the memory that another process named."""
        return self._slabs[name.number][: name.nbytes]
