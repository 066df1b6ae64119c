"""The tiers of a worker: which shard's state is on a device, in DRAM or on disk.

DRAM is a shard's home: while a device works on the state, its slab in DRAM stays as it was when the
state was loaded, until SPILL writes the changes back. Bytes count in a place from the moment that
a move into it begins to the moment that a move out of it has ended.

`Room` makes room on devices and in DRAM: what is used last among what can go, goes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.device_queue import DeviceQueue
from cerebro_hydra.plan.queues.run_progress import RunProgress, Unit

Key = tuple[int, int]  # run and shard


@dataclass(slots=True)
class HeldShard:
    """Tells where one shard's state is."""

    key: Key
    nbytes: int
    home: Literal["receiving", "dram", "spilling", "disk", "loading"] = "receiving"
    device: int | None = None
    move: Literal["loading", "spilling"] | None = None  # to or from the device
    sending: bool = False
    on_disk: bool = False  # what DRAM has is on disk too
    unsaved: list[Action] = field(default_factory=list)  # changes that may be done again
    older_unsaved: bool = False  # there are changes of microbatches that have left nothing

    @property
    def at_rest(self) -> bool:
        """Return whether no move is under way."""
        return self.move is None and self.home in ("dram", "disk") and not self.sending

    @property
    def dirty(self) -> bool:
        """Return whether the device has changes that DRAM has not."""
        return bool(self.unsaved)

    def wrote(self, task: Action, most_open: int) -> None:
        """Note that a task changed the state on the device.

        Of so many microbatches there may be boundary values, with which a task can be done again.
        """
        oldest = (task.microbatch or 0) - most_open + 1
        if any((each.microbatch or 0) < oldest for each in self.unsaved):
            self.older_unsaved = True
            self.unsaved = [each for each in self.unsaved if (each.microbatch or 0) >= oldest]
        self.unsaved.append(task)

    def off_device(self) -> None:
        """Note that the device has the state no longer."""
        self.device = self.move = None
        self.unsaved.clear()
        self.older_unsaved = False


class Tiers:
    """Keeps account of every shard's place and of the bytes in each.

    Its methods begin a move and return the action, or end one; they check no budget.
    """

    def __init__(self, devices: Iterable[int], host_budget: int | None) -> None:
        self.host_budget = math.inf if host_budget is None else host_budget
        self.boundaries = 0  # bytes of DRAM for values between shards
        self._shards: dict[Key, HeldShard] = {}
        self._on: dict[int, dict[Key, HeldShard]] = {device: {} for device in devices}
        self._device_used = dict.fromkeys(self._on, 0)
        self._host_used = 0

    def __iter__(self) -> Iterator[HeldShard]:
        """Return every shard, in the order of arrival."""
        return iter(self._shards.values())

    def get(self, key: Key) -> HeldShard | None:
        """Return a shard, or None before its RECV."""
        return self._shards.get(key)

    def of_run(self, run: int) -> list[HeldShard]:
        """Return the shards of a run."""
        return [held for held in self if held.key[0] == run]

    def on(self, device: int) -> list[HeldShard]:
        """Return the shards on a device, moving ones included."""
        return list(self._on[device].values())

    def used(self, device: int) -> int:
        """Return the bytes of the shards on a device."""
        return self._device_used[device]

    @property
    def host_used(self) -> int:
        """Return the bytes in DRAM."""
        return self._host_used + self.boundaries

    @property
    def host_free(self) -> float:
        """Return the bytes of DRAM that nobody has."""
        return self.host_budget - self.host_used

    # ------------------------------------------------------------------ moves

    def receive(self, key: Key, nbytes: int) -> Action:
        """Make room in DRAM for a shard that comes from elsewhere."""
        self._shards[key] = HeldShard(key, nbytes)
        self._host_used += nbytes
        return Action(*key, ActionKind.RECV)

    def load(self, held: HeldShard, device: int) -> Action:
        """Begin to bring a shard from DRAM to a device."""
        assert held.at_rest and held.home == "dram" and held.device is None
        held.device, held.move = device, "loading"
        self._on[device][held.key] = held
        self._device_used[device] += held.nbytes
        return Action(*held.key, ActionKind.LOAD, device=device)

    def leave_device(self, held: HeldShard, discard: bool = False) -> Action:
        """Begin to take a shard off its device; without changes to write it is off at once."""
        assert held.at_rest and held.device is not None
        if held.dirty and not discard:
            held.move, held.on_disk = "spilling", False
            return Action(*held.key, ActionKind.SPILL, device=held.device)
        action = Action(*held.key, ActionKind.DROP, device=held.device)
        self._off_device(held)
        return action

    def load_from_disk(self, held: HeldShard) -> Action:
        """Begin to bring a shard from disk to DRAM."""
        assert held.at_rest and held.home == "disk"
        held.home = "loading"
        self._host_used += held.nbytes
        return Action(*held.key, ActionKind.LOAD, device=HOST)

    def leave_dram(self, held: HeldShard) -> Action:
        """Begin to take a shard to disk; it is off at once if disk has it already."""
        assert held.at_rest and held.home == "dram" and held.device is None
        if not held.on_disk:
            held.home = "spilling"
            return Action(*held.key, ActionKind.SPILL, device=HOST)
        held.home = "disk"
        self._host_used -= held.nbytes
        return Action(*held.key, ActionKind.DROP, device=HOST)

    def send(self, held: HeldShard) -> Action:
        """Begin to publish a shard."""
        assert held.at_rest and held.device is None
        held.sending = True
        return Action(*held.key, ActionKind.SEND)

    def discard(self, held: HeldShard) -> list[Action]:
        """Forget a shard that is at rest, wherever it is."""
        actions = [] if held.device is None else [self.leave_device(held, discard=True)]
        del self._shards[held.key]
        if held.home == "dram":
            self._host_used -= held.nbytes
            actions.append(Action(*held.key, ActionKind.DROP, device=HOST))
        return actions

    def end(self, action: Action) -> None:
        """Note that a move has ended."""
        held = self._shards[action.trial, action.shard]
        match action.kind:
            case ActionKind.RECV:
                held.home = "dram"
            case ActionKind.LOAD if action.device == HOST:
                held.home, held.on_disk = "dram", True
            case ActionKind.LOAD:
                held.move = None
            case ActionKind.SPILL if action.device == HOST:
                held.home, held.on_disk = "disk", True
                self._host_used -= held.nbytes
            case ActionKind.SPILL:
                self._off_device(held)
            case _:
                held.sending = False

    def lose(self, held: HeldShard) -> None:
        """Note that a shard's device died."""
        self._off_device(held)

    def _off_device(self, held: HeldShard) -> None:
        assert held.device is not None
        self._device_used[held.device] -= held.nbytes
        del self._on[held.device][held.key]
        held.off_device()

    def validate(self) -> None:
        """Check the counted bytes against the shards, and DRAM against its budget."""
        for device, used in self._device_used.items():
            there = {held.key for held in self if held.device == device}
            assert there == self._on[device].keys(), f"shards on device {device}"
            assert used == sum(held.nbytes for held in self.on(device)), f"bytes of device {device}"
        in_dram = sum(held.nbytes for held in self if held.home != "disk")
        assert self._host_used == in_dram, "bytes of DRAM"
        assert self.host_used <= self.host_budget, f"{self.host_used} bytes are in DRAM"
        for held in self:
            assert held.device is None or held.home == "dram", f"{held.key} is not at home"


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
        begun = [run for run in queue.staying if queue.has_begun(run)]
        kept = sum(run.share_on(queue.number).held for run in begun)
        working = 0 if queue.running is None else self._activations(queue, queue.running)
        return self._tiers.used(queue.number) + kept + working

    def work(self, queue: DeviceQueue, unit: Unit) -> int:
        """Return the bytes that the reserved unit adds to its shard when it starts."""
        run = self._runs[unit.run]
        begins = run in queue.staying and not queue.has_begun(run)
        held = run.share_on(queue.number).held
        return self._activations(queue, unit) + (held if begins else 0)

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
        if math.isinf(queue.budget):
            return []
        changed = [held for held in self._evictable(queue) if held.dirty]
        if not changed:
            return []
        number = queue.number
        runs = [r for r in self._runs.values() if r.status == "open" and r.list_on(number)]
        wanted = sum(run.share_on(number).state for run in runs)
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
