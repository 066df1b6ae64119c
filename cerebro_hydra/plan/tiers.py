"""The tiers of a worker: which shard's state is on a device, in DRAM or on disk.

DRAM is a shard's home: while a device works on the state, its slab in DRAM stays as it was when the
state was loaded, until SPILL writes the changes back. Bytes count in a place from the moment that
a move into it begins to the moment that a move out of it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from cerebro_hydra.plan.actions import HOST, Action, ActionKind

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
    unsaved: list[Action] = field(default_factory=list)  # the newest microbatch's changes
    older_unsaved: bool = False  # there are changes of older microbatches

    @property
    def at_rest(self) -> bool:
        """Return whether no move is under way."""
        return self.move is None and self.home in ("dram", "disk") and not self.sending

    @property
    def dirty(self) -> bool:
        """Return whether the device has changes that DRAM has not."""
        return bool(self.unsaved)

    def wrote(self, task: Action) -> None:
        """Note that a task changed the state on the device."""
        if self.unsaved and self.unsaved[0].microbatch != task.microbatch:
            self.older_unsaved = True
            self.unsaved.clear()
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
