"""The evictor makes room on devices and in DRAM: of what can go, what is used last goes first."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.device_queue import DeviceQueue
from cerebro_hydra.plan.queues.ledger import Block, Ledger, state_key
from cerebro_hydra.plan.queues.visit import Unit, Visit

LATER = 1e6
"""Is added to the distance of the tasks of a visit that has not begun."""

ELSEWHERE = 1e9
"""Stands for the distance of a task that is not known here yet, and maybe for another worker."""


class Evictor:
    """Moves blocks out of the way of others.

    Each method that makes room for the queues returns the actions that it has begun. A move that
    writes gives its bytes back when it has ended, so the caller asks again after the next event.
    """

    def __init__(
        self,
        ledger: Ledger,
        visits: Mapping[int, Visit],
        queues: Mapping[int, DeviceQueue],
    ) -> None:
        self._ledger = ledger
        self._visits = visits
        self._queues = queues

    def used(self, queue: DeviceQueue) -> int:
        """Return the bytes that are in use on a device, those of what it was given included."""
        begun = [visit for visit in queue.staying if queue.has_begun(visit)]
        kept = sum(visit.share_on(queue.number).held for visit in begun)
        working = max(queue.activations, default=0)  # the device does one unit at a time
        return self._ledger.used(queue.number) + kept + working

    def work(self, queue: DeviceQueue, unit: Unit) -> int:
        """Return the bytes that the reserved unit adds to what is in use when it is given."""
        visit = self._visits[unit.visit]
        begins = visit in queue.staying and not queue.has_begun(visit)
        held = visit.share_on(queue.number).held if begins else 0
        working = max(queue.activations, default=0)
        return held + max(self.activations(queue, unit) - working, 0)

    def activations(self, queue: DeviceQueue, unit: Unit) -> int:
        """Return the bytes that only the unit itself has; a staying microbatch may hold them."""
        visit = self._visits[unit.visit]
        kept = visit.spec.keeps_all and visit in queue.staying
        kept = kept and (unit is queue.reserved or queue.has_begun(visit))
        return 0 if kept else max(visit.spec.shards[key.number].activations for key in unit.keys)

    def free(self, queue: DeviceQueue) -> float:
        """Return the bytes of a device that nobody has."""
        return math.inf if math.isinf(queue.budget) else queue.budget - self.used(queue)

    def on_device(self, queue: DeviceQueue, nbytes: int) -> list[Action]:
        """Move blocks off a device until ``nbytes`` are free, or will be when moves have ended."""
        ledger = self._ledger
        coming = sum(b.device_bytes for b in ledger.on(queue.number) if b.move == "spilling")
        actions: list[Action] = []
        free = self.free(queue) + coming
        for block in self._furthest_first(self._evictable(queue)):
            if free >= nbytes:
                break
            free += block.device_bytes
            actions.append(ledger.leave_device(block))
        return actions

    def in_dram(self, nbytes: int, beyond: float) -> list[Action]:
        """Move blocks to disk whose next use is later than ``beyond``, as ``on_device`` does."""
        ledger = self._ledger
        coming = sum(b.nbytes for b in ledger if b.home == "spilling" or b.move == "spilling")
        movable = [
            block
            for block in ledger
            if block.home == "dram"
            and block.device is None
            and block.at_rest
            and not (block.pinned or self._used(block))
        ]
        for queue in self._queues.values():
            movable += self._evictable(queue)
        actions: list[Action] = []
        free = ledger.host_free + coming
        for block in self._furthest_first(movable):
            if free >= nbytes or self.next_use(block) <= beyond:
                break
            free += block.nbytes
            if block.device is not None:
                actions.append(ledger.leave_device(block))
            if block.at_rest:
                actions.append(ledger.leave_dram(block))
        return actions

    def kept(self, nbytes: int, idle: Collection[str]) -> list[str]:
        """Return the kept blocks that go to disk for so many bytes of DRAM, by their digests.

        Of those that are used last, what disk has goes first, and then what was unused longest.

        Args:
            idle: the blocks that can go, because they are in DRAM and nobody reads them.
        """
        uses = self.kept_uses()
        blocks = [block for block in self._ledger.kept if block.in_dram and block.digest in idle]
        going: list[str] = []
        blocks.sort(key=lambda each: (uses[each.digest], each.on_disk), reverse=True)
        for block in blocks:
            if nbytes <= 0:
                break
            nbytes -= block.nbytes
            going.append(block.digest)
        return going

    def kept_uses(self) -> dict[str, float]:
        """Return how far away the next task is that needs each kept block, by its digest.

        It is infinity for what is needed only if a later state is lost, or by a trial to come.
        """
        ledger, uses = self._ledger, dict[str, float]()

        def use(digest: str, distance: float) -> None:
            uses[digest] = min(uses.get(digest, math.inf), distance)

        for state, shards in ledger.states.items():
            taken = ledger.taken(state)
            for shard, segments in shards.items():
                for digest, _ in segments.values():
                    use(digest, math.inf if shard in taken else ELSEWHERE)
        for visit in self._visits.values():
            if visit.spec.source is None or visit.status == "cancelled":
                continue
            for shard, segments in ledger.states.get(visit.spec.source, {}).items():
                block, distance = (
                    ledger.get(state_key(visit.spec.visit, shard)),
                    _next_read(visit, shard),
                )
                for name, (digest, _) in segments.items():
                    if block is None or not block.changed or name == "frozen":
                        use(digest, distance)
        return {block.digest: uses.get(block.digest, math.inf) for block in ledger.kept}

    def demote(self, queue: DeviceQueue) -> list[Action]:
        """Write back what a device has changed and does not use next, if not all visits fit."""
        if math.isinf(queue.budget):
            return []
        changed = [block for block in self._evictable(queue) if block.dirty]
        if not changed:
            return []
        number = queue.number
        visits = [r for r in self._visits.values() if r.status == "open" and r.list_on(number)]
        wanted = sum(visit.share_on(number).state for visit in visits)
        if wanted + self.used(queue) - self._ledger.used(number) <= queue.budget:
            return []
        return [self._ledger.leave_device(block) for block in changed]

    def next_use(self, block: Block) -> float:
        """Return how far away the next task is that needs a state; infinity if none does."""
        visit = self._visits[block.key.visit]
        return visit.next_use(block.key.number) if visit.status == "open" else math.inf

    def _furthest_first(self, blocks: Iterable[Block]) -> list[Block]:
        return sorted(blocks, key=self.next_use, reverse=True)

    def _evictable(self, queue: DeviceQueue) -> list[Block]:
        kept = {visit.spec.visit for visit in queue.staying if visit.spec.keeps_all}
        return [
            block
            for block in self._ledger.on(queue.number)
            if block.at_rest and not self._used(block) and block.key.visit not in kept
        ]

    def _used(self, block: Block) -> bool:
        return self._visits[block.key.visit].uses(block.key)


def _next_read(visit: Visit, shard: int) -> float:
    """Return how far away the next task is for which a visit may read a shard of its source."""
    return visit.next_use(shard) + (0 if visit.status == "open" else LATER)
