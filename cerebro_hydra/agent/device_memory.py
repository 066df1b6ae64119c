"""The memory of a CPU device: slots that shards are copied into, and back from."""

from __future__ import annotations

from collections.abc import Mapping

from cerebro_hydra.agent.buffer_pool import POISON, BufferPool
from cerebro_hydra.shards.layout import Bytes, Memory, Segments, memory_of


class DeviceMemory:
    """Lends slots, each of which holds a segment. Thread-safe.

    Slots of one size are taken from the system once and used again.

    Args:
        poison: overwrite a slot that is given up, so that a test sees whoever still reads it.
    """

    def __init__(self, poison: bool = False) -> None:
        self._poison = poison
        self._pool = BufferPool(poison)

    @property
    def peak(self) -> int:
        """Return the most bytes that slots had at once."""
        return self._pool.peak

    def promote(self, slabs: Mapping[str, Bytes], gradients: int) -> Segments:
        """Return slots with the content of slabs, and one of zeros for gradients if it is named."""
        slots = {name: self._slot(slab.nbytes) for name, slab in slabs.items()}
        for name, slot in slots.items():
            slot.copy_(memory_of(slabs[name]))
        if gradients and "gradients" not in slots:
            slots["gradients"] = self._slot(gradients).zero_()
        return slots

    def _slot(self, nbytes: int) -> Memory:
        return memory_of(self._pool.lease(nbytes))

    def demote(self, slots: Segments, slabs: Mapping[str, Bytes]) -> None:
        """Copy slots into the slabs of their names."""
        for name in slots.keys() & slabs.keys():
            memory_of(slabs[name]).copy_(slots[name])

    def give_up(self, slots: Segments) -> None:
        """Note that nobody may read the slots any more."""
        if self._poison:
            for slot in slots.values():
                slot.fill_(POISON)

    def finish(self) -> None:
        """Wait until the device has computed what it was told."""
