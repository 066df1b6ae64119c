"""The hardware of a CUDA device: streams, events, and host memory that is pinned for them.

It is a thin shell, because only a GPU can test it: what must wait for what is decided in
``DeviceMemory`` and ``Device``, which run on streams that a test holds back, too.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.agent.buffer_pool import Lease
from cerebro_hydra.agent.device_runtime import Stream
from cerebro_hydra.shards.layout import Bytes

_log = logging.getLogger(__name__)


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
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
