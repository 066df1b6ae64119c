"""The home of a shard while its worker trains it: slabs in DRAM, or a file on scratch disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro_hydra.agent.scratch_file import ScratchFile
from cerebro_hydra.agent.segment_store import SegmentStore
from cerebro_hydra.agent.shard_store import HeldShard, Shard
from cerebro_hydra.shards.layout import Bytes
from cerebro_hydra.storage.digest import digest


class ShardHome:
    """Holds one shard of a run; one thread at a time uses it.

    At first its bytes are those of the state before, which is never changed: what a device writes
    back gets slabs of its own.

    Args:
        held: the shard of the state before.
        segments: has the bytes of that state, and gives memory.
        scratch: a folder on a disk of this machine.
    """

    def __init__(self, held: HeldShard, segments: SegmentStore, scratch: str) -> None:
        self._names = held.names
        self._segments = segments
        self._scratch = scratch
        self.cursor: Mapping[str, Any] | None = held.cursor or None
        self._stored = {name: buffer for name, (_, buffer) in held.segments.items()}
        self._own: dict[str, Bytes] = {}
        self._files: dict[str, ScratchFile] = {}
        self._sizes: dict[str, int] = {}

    @property
    def slabs(self) -> Mapping[str, Bytes]:
        """Return the shard's bytes, which are in DRAM, by name."""
        return self._stored | self._own

    @property
    def bytes_on_disk(self) -> int:
        """Return the bytes of the shard's files, which are what moves between disk and DRAM."""
        return sum(self._sizes[name] for name in self._files)

    def room_for(self, sizes: Mapping[str, int]) -> Mapping[str, Bytes]:
        """Return slabs that a device may write the shard's changes to."""
        for name, nbytes in sizes.items():
            if name not in self._own:
                self._own[name] = self._segments.allocate(nbytes)
        return {name: self._own[name] for name in sizes}

    def changed(self, cursor: Mapping[str, Any] | None, has_gradients: bool) -> None:
        """Note that a device has written to the slabs."""
        self.cursor = cursor
        self._files.clear()
        self._stored.pop("trainable", None)
        if not has_gradients:
            self._own.pop("gradients", None)

    def to_disk(self) -> None:
        """Move what is in slabs of its own to files; the state before has its own place.

        Raises:
            ScratchFull: the disk has no room for it.
        """
        for name, slab in self._own.items():
            self._files[name] = ScratchFile(self._scratch, slab)
            self._sizes[name] = slab.nbytes
        self.leave_dram()

    def to_dram(self) -> None:
        """Bring back what `leave_dram` let go."""
        for name, file in self._files.items():
            slab = self._own[name] = self._segments.allocate(self._sizes[name])
            file.read_into(slab)
        for name in self._names:
            if name not in self._own:
                buffer = self._segments.get(self._names[name])
                assert buffer is not None, "a task keeps the state that it began with"
                self._stored[name] = buffer

    def leave_dram(self) -> None:
        """Let go of all memory; what is not on disk is lost."""
        self._own.clear()
        self._stored.clear()

    def leave(self) -> None:
        """Let go of all memory and files."""
        self.leave_dram()
        self._files.clear()

    def published(self) -> Shard:
        """Return the shard as the newest state has it."""
        if not self._own and not self._stored:
            self.to_dram()
        trainable = self.slabs["trainable"]
        named = {
            "frozen": (self._names["frozen"], self.slabs["frozen"]),
            "trainable": (digest(trainable), trainable),
        }
        return Shard(named, self.cursor or {})
