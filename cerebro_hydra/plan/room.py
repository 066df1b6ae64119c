"""Makes room on devices and in DRAM: what is used last among what can go, goes first."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cerebro_hydra.plan.actions import Action
from cerebro_hydra.plan.device_queue import DeviceQueue
from cerebro_hydra.plan.run_progress import RunProgress, Unit
from cerebro_hydra.plan.tiers import HeldShard, Tiers


class Room:
    """Moves shards out of the way of others.

    Each method returns the actions that it has begun. A move that writes gives its bytes back when
    it has ended, so the caller asks again after the next event.
    """

    def __init__(
        self,
        tiers: Tiers,
        runs: Mapping[int, RunProgress],
        queues: Mapping[int, DeviceQueue],
    ) -> None:
        self._tiers = tiers
        self._runs = runs
        self._queues = queues

    def used(self, queue: DeviceQueue) -> int:
        """Return the bytes that are in use on a device, the running task's included."""
        kept = sum(run.spec.held_bytes for run in queue.staying if queue.has_begun(run))
        working = 0 if queue.running is None else self._activations(queue, queue.running)
        return self._tiers.used(queue.number) + kept + working

    def work(self, queue: DeviceQueue, unit: Unit) -> int:
        """Return the bytes that the reserved unit adds to its shard when it starts."""
        run = self._runs[unit.run]
        begins = run in queue.staying and not queue.has_begun(run)
        return self._activations(queue, unit) + (run.spec.held_bytes if begins else 0)

    def _activations(self, queue: DeviceQueue, unit: Unit) -> int:
        """Return the bytes that only the unit itself has; a staying microbatch may hold them."""
        run = self._runs[unit.run]
        joined = unit is queue.reserved or queue.has_begun(run)
        kept = run.spec.keeps_all and run in queue.staying and joined
        return 0 if kept else max(run.spec.shards[k].activations for k in unit.shards)

    def free(self, queue: DeviceQueue) -> float:
        """Return the bytes of a device that nobody has."""
        return queue.budget - self.used(queue)

    def on_device(self, queue: DeviceQueue, nbytes: int) -> list[Action]:
        """Move shards off a device until ``nbytes`` are free, or will be when moves have ended."""
        coming = sum(
            held.nbytes for held in self._tiers.on(queue.number) if held.move == "spilling"
        )
        actions: list[Action] = []
        free = self.free(queue) + coming
        for held in self._by_next_use(self._evictable(queue)):
            if free >= nbytes:
                break
            free += held.nbytes
            actions.append(self._tiers.leave_device(held))
        return actions

    def in_dram(self, nbytes: int, beyond: float) -> list[Action]:
        """Move shards to disk whose next use is later than ``beyond``, as ``on_device`` does."""
        tiers = self._tiers
        coming = sum(
            held.nbytes for held in tiers if held.home == "spilling" or held.move == "spilling"
        )
        movable = [
            held
            for held in tiers
            if held.at_rest and held.home == "dram" and held.device is None and not self._used(held)
        ]
        for queue in self._queues.values():
            movable += self._evictable(queue)
        actions: list[Action] = []
        free = tiers.host_free + coming
        for held in self._by_next_use(movable):
            if free >= nbytes or self.next_use(held) <= beyond:
                break
            free += held.nbytes
            if held.device is not None:
                actions.append(tiers.leave_device(held))
            if held.at_rest:
                actions.append(tiers.leave_dram(held))
        return actions

    def demote(self, queue: DeviceQueue) -> list[Action]:
        """Write back what a device has changed and does not use next, if not all runs fit there."""
        changed = [held for held in self._evictable(queue) if held.dirty]
        if not changed:
            return []
        wanted = sum(r.spec.state_bytes for r in self._runs.values() if r.status == "open")
        if wanted + self.used(queue) - self._tiers.used(queue.number) <= queue.budget:
            return []
        return [self._tiers.leave_device(held) for held in changed]

    def next_use(self, held: HeldShard) -> float:
        """Return how far away the shard's next task is; infinity if it was the last one."""
        run = self._runs[held.key[0]]
        return run.next_use(held.key[1]) if run.status == "open" else math.inf

    def _by_next_use(self, shards: list[HeldShard]) -> list[HeldShard]:
        return sorted(shards, key=self.next_use, reverse=True)

    def _evictable(self, queue: DeviceQueue) -> list[HeldShard]:
        kept = {run.spec.run for run in queue.staying if run.spec.keeps_all}
        return [
            held
            for held in self._tiers.on(queue.number)
            if held.at_rest and not self._used(held) and held.key[0] not in kept
        ]

    def _used(self, held: HeldShard) -> bool:
        return any(queue.has(held.key) for queue in self._queues.values())
