"""Streams that do everything as late as they may: when somebody waits for them.

Whoever reads bytes before a stream was waited for reads what was there before, and whoever writes
to them sees it overwritten, every time. ``HostRuntime`` is the other extreme, and a GPU in between.
As on a GPU, what a stream has yet to do keeps no slot from being lent again.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.agent.memory.pool import POISON, Lease
from cerebro_hydra.shards.engine.layout import Bytes


class LateStream:
    """Does what it is given when it is waited for.

    Args:
        blocks: the memory of the device by address, which nobody's end frees.
    """

    def __init__(self, blocks: dict[int, Tensor]) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._begun: list[Callable[[], object]] = []

    def begin(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._begun.append(work)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.begin(partial(self.block(target).copy_, self.block(source)))

    def fill(self, target: Tensor, value: int) -> None:
        self.begin(partial(self.block(target).fill_, value))

    def wait(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, []
            for work in begun:
                work()

    def block(self, slot: Tensor) -> Tensor:
        """Return the same memory, whoever has it by then."""
        return self._blocks.get(slot.data_ptr(), slot)


class LateRuntime:
    """Has the streams of a GPU, on this machine."""

    def __init__(self) -> None:
        blocks: dict[int, Tensor] = {}
        self.promoting, self.demoting, self.computing = (LateStream(blocks) for _ in range(3))
        self.blocks = blocks
        self.released = 0
        self.lost = False
        self._free: defaultdict[int, list[Bytes]] = defaultdict(list)

    def empty(self, nbytes: int) -> Tensor:
        free = self._free[nbytes]
        if not free:
            memory = np.full(nbytes, POISON, np.uint8)
            self.blocks[memory.ctypes.data] = torch.from_numpy(memory)
            free.append(memory)
        return torch.from_numpy(np.asarray(Lease(free.pop(), free.append)))

    def compute(self, slot: Tensor, work: Callable[[Tensor], object]) -> None:
        """Begin to compute with a slot."""
        self.computing.begin(partial(work, self.computing.block(slot)))

    def mapped(self, slab: Bytes) -> Bytes:
        return slab

    def release(self) -> None:
        self.released += 1

    def is_lost(self) -> bool:
        return self.lost


def late_memory() -> DeviceMemory:
    return DeviceMemory(poison=True, runtime=LateRuntime())
