"""What a device's memory asks of the hardware: memory, copies beside the computing, waiting."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cerebro_hydra.agent.buffer_pool import BufferPool
from cerebro_hydra.shards.layout import Bytes


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
        self._pool = BufferPool(poison)

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
