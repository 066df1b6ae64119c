"""The slots of a device, into which shards are copied, and from which they are written back."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from cerebro_hydra.agent.device.runtime import DeviceRuntime, HostRuntime
from cerebro_hydra.agent.memory.pool import POISON
from cerebro_hydra.shards.engine.layout import Bytes, Segments, in_place, memory_of, on_host


class DeviceMemory:
    """Lends slots, each of which holds a segment. Thread-safe.

    Every copy is complete when it returns, and `finish` says that of a task. So streams never meet
    on a slot: whoever uses it next was told so after the one before it had been waited for.

    Args:
        poison: overwrite a slot that is given up, so that a test sees whoever still reads it.
        runtime: has the device's bytes and streams; None is a CPU device.
        in_place: slots are the slabs themselves, which are memory of this process.
    """

    def __init__(
        self,
        poison: bool = False,
        runtime: DeviceRuntime | None = None,
        in_place: bool = False,
    ) -> None:
        self._poison = poison and not in_place
        self._in_place = in_place
        self.runtime = HostRuntime(poison) if runtime is None else runtime
        self._lock = threading.Lock()
        self._used = 0
        self._peak = 0

    @property
    def peak(self) -> int:
        """Return the most bytes that slots had at once."""
        return self._peak

    def promote(self, slabs: Mapping[str, Bytes], gradients: int) -> Segments:
        """Return slots with the content of slabs, and one of zeros for gradients if it is named."""
        if self._in_place:
            return on_host(in_place(dict(slabs)))
        sizes = {name: slab.nbytes for name, slab in slabs.items()}
        if gradients:
            sizes.setdefault("gradients", gradients)
        slots = {name: self.runtime.empty(nbytes) for name, nbytes in sizes.items()}
        stream = self.runtime.promoting
        for name, slot in slots.items():
            if name in slabs:
                stream.copy(slot, memory_of(slabs[name]))
            else:
                stream.fill(slot, 0)
        stream.wait()
        self._count(_nbytes(slots))
        return slots

    def demote(self, slots: Segments, slabs: Mapping[str, Bytes]) -> None:
        """Copy slots into the slabs of their names, unless they are these slabs."""
        stream = self.runtime.demoting
        for name in slots.keys() & slabs.keys():
            slab = memory_of(slabs[name])
            if slab.data_ptr() != slots[name].data_ptr():
                stream.copy(slab, slots[name])
        stream.wait()

    def give_up(self, slots: Segments) -> None:
        """Note that nobody may read the slots any more."""
        if not self._in_place:
            self._count(-_nbytes(slots))
        if self._poison:
            for slot in slots.values():
                self.runtime.demoting.fill(slot, POISON)
            self.runtime.demoting.wait()

    def finish(self) -> None:
        """Wait until the device has computed what it was told."""
        self.runtime.computing.wait()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._used += nbytes
            self._peak = max(self._peak, self._used)


def _nbytes(slots: Segments) -> int:
    return sum(slot.nbytes for slot in slots.values())
