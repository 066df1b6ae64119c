"""Lends the memory of segments, and lends it again once nobody can read it any more.

Slabs are memory that the processes of a worker share: host memory with a file descriptor.

An agent's pool takes its memory from ``Slabs``, so whatever lies in it, a received segment as well
as a spilled shard, reaches a device's process by number. The memory has no name in any file system
and vanishes with the last process that maps it, however that ends.

What has no room lies in a file without a name, so that nothing is left of it when its process ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cerebro_hydra.errors import ScratchFull
from cerebro_hydra.plan.human_units import bytes_text
from cerebro_hydra.shards.engine.layout import Bytes, aligned

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


def private_pages(nbytes: int) -> Bytes:
    """Return memory that no gap in the heap can hold on to: it goes back as soon as it is freed.

    Raises:
        MemoryError: the system has not so much.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1), private), np.uint8)[:nbytes]
    except OSError as error:
        raise MemoryError(f"can't take {nbytes} bytes of memory: {error}") from error


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


class ScratchFile:
    """Holds the bytes that it was made of; the file goes with the last reference to this object.

    Args:
        folder: on a disk of this machine.
        content: is written at once.

    Raises:
        ScratchFull: the disk has no room for the whole content; nothing of it is kept.
        OSError: the folder is no good, or too few file descriptors would be left for connections.
    """

    def __init__(self, folder: str, content: Bytes) -> None:
        self.nbytes = content.nbytes
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
            if self._file.fileno() > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
                raise OSError("half of the process's file descriptors are in use (ulimit -n)")
            if content.nbytes:  # all of it has room before any of it is written
                os.posix_fallocate(self._file.fileno(), 0, content.nbytes)
            rest = content.data
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._close()  # whoever handles the error may hold this object
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ScratchFull(_refusal(folder, content.nbytes, error)) from error
            raise

    def __del__(self) -> None:
        self._close()

    def read_into(self, buffer: Bytes) -> None:
        """Fill the buffer; one thread at a time.

        Raises:
            OSError: the disk failed.
        """
        self._file.seek(0)
        rest = buffer.data
        while count := self._file.readinto(rest):
            rest = rest[count:]

    def _close(self) -> None:
        if hasattr(self, "_file"):  # not if the folder was no good
            self._file.close()


def _refusal(folder: str, nbytes: int, error: OSError) -> str:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    return (
        f"can't write {bytes_text(nbytes)} to the scratch folder {folder!r}: {error.strerror}, "
        f"{bytes_text(free)} are free; free space there, or give the backend another scratch or a "
        "larger host_memory"
    )
