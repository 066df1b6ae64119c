"""What a device asks of its process and of the hardware: a thread, memory, copies beside, waiting.

A lane does what it is given on one thread, one thing after the other. For CUDA the others are
streams, events, and host memory that is pinned for them.

It is a thin shell, because only a GPU can test it: what must wait for what is decided in
``DeviceMemory`` and ``Device``, which run on streams that a test holds back, too.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.agent.device.visible_gpus import reserved
from cerebro_hydra.agent.memory.pool import BufferPool, Lease, private_pages
from cerebro_hydra.shards.engine.layout import Bytes

_log = logging.getLogger(__name__)


class Lane:
    """Does one thing after the other, on a thread of its own or on the one that calls `run`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._items: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread: int | None = None

    def start(self, on_error: Callable[[], object]) -> None:
        """Begin on a thread of its own.

        Args:
            on_error: is called if something raises, after which nobody would do the rest.
        """

        def run() -> None:
            try:
                self.run()
            except BaseException:
                _log.exception("thread %s of a device can't go on", self._name)
                on_error()

        threading.Thread(target=run, name=self._name, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        """Let something be done; called from any thread."""
        self._items.put(work)

    def close(self) -> None:
        """End after what was put before."""
        self._items.put(None)

    def run(self) -> None:
        """Do what is put, until it is closed."""
        self.thread = threading.get_ident()
        while self.step():
            pass

    def step(self) -> bool:
        """Do the next thing, once it is there; return whether there was one before the end."""
        if (work := self._items.get()) is None:
            return False
        work()  # its slabs are given back before the next order comes
        return True


THE_GPU = torch.device("cuda", 0)
"""The only one that a process sees after `show_gpu`."""


class Stream(Protocol):
    """Does what it is given in order, maybe later and beside other streams. Thread-safe."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy."""
        ...

    def fill(self, target: Tensor, value: int) -> None:
        """Begin to set every byte."""
        ...

    def wait(self) -> None:
        """Wait until all is done that was begun here, and for nothing else."""
        ...


class DeviceRuntime(Protocol):
    """Gives a device its memory and streams; what runs on one sees nothing of the others.

    So whoever hands memory from one stream to another waits for the first.

    Attributes:
        promoting: copies shards to the device.
        demoting: copies them back.
        computing: does what a trial's code begins.
    """

    promoting: Stream
    demoting: Stream
    computing: Stream

    def empty(self, nbytes: int) -> Tensor:
        """Return bytes of the device, with any content, for `promoting` to write to first.

        They are used again once no tensor looks into them, so all streams must have been waited for
        by then.
        """
        ...

    def mapped(self, slab: Bytes) -> Bytes:
        """Return a slab that has come into this process, so that it is copied as fast as it can."""
        ...

    def release(self) -> None:
        """Give memory that nobody uses back to the system."""
        ...

    def is_lost(self) -> bool:
        """Return whether nothing can be computed here any more."""
        ...


class HostStream:
    """Does everything at once, on the thread that asks for it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def fill(self, target: Tensor, value: int) -> None:
        """Set every byte."""
        target.fill_(value)

    def wait(self) -> None:
        """Return: nothing is under way."""


class HostRuntime:
    """Gives a CPU device a part of the host's memory.

    Args:
        poison: overwrite memory that nobody uses any more.
    """

    def __init__(self, poison: bool = False) -> None:
        self.promoting: Stream = HostStream()
        self.demoting: Stream = self.promoting
        self.computing: Stream = self.promoting
        self._pool = BufferPool(poison, private_pages)

    def empty(self, nbytes: int) -> Tensor:
        """Return bytes, warm ones of the same size if there are."""
        return torch.from_numpy(self._pool.lease(nbytes))

    def mapped(self, slab: Bytes) -> Bytes:
        """Return a slab as it is."""
        return slab

    def release(self) -> None:
        """Give memory that nobody uses back to the system."""
        self._pool.trim(0)

    def is_lost(self) -> bool:
        """Return False: what breaks a process ends it."""
        return False


class CudaStream:
    """Does what it is given on a stream of a GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy; between pinned memory and the device it goes on by itself."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def fill(self, target: Tensor, value: int) -> None:
        """Begin to set every byte."""
        with torch.cuda.stream(self._stream):
            target.fill_(value)

    def wait(self) -> None:
        """Wait for what was begun here; the thread sleeps meanwhile."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        event.synchronize()


class CudaRuntime:
    """Gives a GPU's memory and three of its streams; torch's own is the one that computes.

    Torch's allocator keeps what slots had, apart from what tasks use: it belongs to the stream that
    promotes. So a slot gets the memory of one of its size before, and what tasks lack is taken from
    what no slot has.

    Args:
        budget: the bytes for shards and tasks. This process gets these and what is left to kernels,
            beyond which torch says that it is out of memory; None is all of the GPU.
    """

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        self._device = device
        if budget is not None:
            _, total = torch.cuda.mem_get_info(device)
            share = min(1.0, (budget + reserved(total)) / total)
            torch.cuda.set_per_process_memory_fraction(share, device)
        self._copies_in = torch.cuda.Stream(device)
        self.promoting: Stream = CudaStream(self._copies_in)
        self.demoting: Stream = CudaStream(torch.cuda.Stream(device))
        self.computing: Stream = CudaStream(torch.cuda.default_stream(device))
        self._cudart = torch.cuda.cudart()
        self._can_pin = True

    def empty(self, nbytes: int) -> Tensor:
        """Return bytes of the device."""
        with torch.cuda.stream(self._copies_in):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def mapped(self, slab: Bytes) -> Bytes:
        """Return a slab pinned, which it is as long as anybody looks into it.

        Only a thread that computes nothing may call this: CUDA tells its next user in the same
        thread of an error here once more.
        """
        if not self._can_pin or not slab.nbytes:
            return slab
        error = self._cudart.cudaHostRegister(slab.ctypes.data, slab.nbytes, 0)
        if error == self._cudart.cudaError.success:
            return np.asarray(Lease(slab, self._unpin))
        self._can_pin = False
        _log.warning(
            "can't pin %d bytes of host memory (%s), so shards are copied to the GPU slower and "
            "not beside its computing; raise the limit of locked memory (ulimit -l; for "
            "containers --ulimit memlock=-1), or lower host_memory",
            slab.nbytes,
            torch.cuda.CudaError(int(error)),
        )
        return slab

    def release(self) -> None:
        """Give memory that nobody uses back to the GPU."""
        torch.cuda.empty_cache()

    def is_lost(self) -> bool:
        """Return whether the GPU refuses everything, as it does after an illegal access."""
        try:
            self.computing.wait()
        except RuntimeError:
            return True
        return False

    def _unpin(self, slab: Bytes) -> None:
        self._cudart.cudaHostUnregister(slab.ctypes.data)
