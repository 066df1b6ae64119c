"""What a run's microbatch leaves in DRAM between two units, for whichever device does the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cerebro_hydra.agent.device_messages import Compute
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.shards.layout import Bytes
from cerebro_hydra.shards.pass_record import PassRecord
from cerebro_hydra.shards.sub_epoch import Norms


class RunBoundary:
    """Keeps the memory of a run's microbatch and a record after each of its units.

    A unit begins with the record of the one before it, also if it is done again because a device
    was lost. Every order refers to the memory, so nobody else gets that before it is answered.

    Args:
        slab: memory that devices share, for all that a microbatch leaves.
        shards: how many the run has.
    """

    def __init__(self, slab: Bytes, shards: int) -> None:
        self._slab = slab
        self._shards = shards
        self._microbatch: int | None = None
        self._records: dict[int, PassRecord] = {}  # by the place of the task that they come after
        self._norms: dict[int, Norms] = {}
        self._place: int | None = None  # of the last task of the unit under way

    def order(self, tasks: Sequence[Action]) -> Compute:
        """Return the order to do a unit, the only one of the run that is under way."""
        if tasks[0].microbatch != self._microbatch:
            self._microbatch = tasks[0].microbatch
            self._records.clear()
            self._norms.clear()
        first = self._place_of(tasks[0])
        before = max((place for place in self._records if place < first), default=None)
        record = PassRecord() if before is None else self._records[before]
        record = replace(record, norms=self._norms.copy())  # an update needs those of later tasks
        passes = [task for task in tasks if task.kind is not ActionKind.U]
        self._place = self._place_of(passes[-1]) if passes else None
        return Compute(tuple(tasks), {"boundary": self._slab}, record)

    def note(self, record: PassRecord) -> None:
        """Keep what the unit under way has left."""
        self._norms |= record.norms
        if self._place is not None:
            self._records[self._place] = record

    def _place_of(self, task: Action) -> int:
        """Return where in its microbatch a task comes; updates come after all that they need."""
        backward = 2 * self._shards - 1 - task.shard
        if task.kind is ActionKind.U:
            return 2 * self._shards
        return task.shard if task.kind is ActionKind.F else backward
