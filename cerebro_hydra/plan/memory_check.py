"""Checks where each shard is and how many bytes each place holds, action by action.

It knows no schedule and shares no code with the queues that it checks. The validator feeds it a
list of actions; the simulator tells it when each action begins and ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.actions import HOST, Action, ActionKind

Key = tuple[int, int]  # trial and shard
Place = int | None  # the device of an action, which may be HOST or unnamed


@dataclass(slots=True)
class _Whereabouts:
    """Holds where one shard's state is."""

    in_dram: bool
    on_device: bool = False
    device: Place = None
    moving: bool = False
    written: bool = False  # the device has changes that DRAM has not


class MemoryCheck:
    """Follows the shards of a worker through its tiers.

    Args:
        budgets: the bytes of each device; None means no limit.
        host_budget: the bytes of DRAM; None means no limit.
        state: the bytes of each shard's state.
        activations: the bytes that a task of the shard has beside the state.
    """

    def __init__(
        self,
        budgets: Mapping[Place, int | None],
        host_budget: int | None,
        state: Mapping[Key, int],
        activations: Mapping[Key, int] | None = None,
    ) -> None:
        self.budgets: dict[Place, int | None] = {**budgets, HOST: host_budget}
        self.peak: dict[Place, int] = dict.fromkeys(self.budgets, 0)
        self._used: dict[Place, int] = dict.fromkeys(self.budgets, 0)
        self._state = state
        self._activations = {} if activations is None else activations  # may be filled later
        self._shards: dict[Key, _Whereabouts] = {}
        self._abandoned: set[int] = set()  # runs whose changes may be lost

    def begin_resident(self, shards: Collection[Key], device: Place) -> None:
        """Put shards on a device before the first action."""
        for key in shards:
            self._shards[key] = _Whereabouts(True, True, device)
            self._used[device] += self._state.get(key, 0)
        budget = self.budgets[device]
        if budget is not None and self._used[device] > budget:
            raise InvalidSchedule(
                f"{self._used[device]} bytes are resident at first, but the budget is {budget}"
            )

    def begin(self, action: Action) -> None:
        """Begin an action, whose bytes count from now on.

        Raises:
            InvalidSchedule: the shard is not where the action needs it, or a budget is passed.
        """
        key = (action.trial, action.shard)
        here = self._shards.get(key)
        state = self._state.get(key, 0)
        match action.kind:
            case ActionKind.RECV:
                forgotten = here is not None and action.trial in self._abandoned
                forgotten &= here is None or not (here.in_dram or here.moving)
                self._demand(here is None or forgotten, action, "the shard was received before")
                self._shards[key] = _Whereabouts(True, moving=True)
                self._add(HOST, state, action)
            case ActionKind.LOAD if action.device == HOST:
                here = self._at_rest(here, action)
                self._demand(not here.in_dram, action, "the shard is in DRAM already")
                here.in_dram = here.moving = True
                self._add(HOST, state, action)
            case ActionKind.LOAD:
                if here is None and self.budgets[HOST] is None:  # the list says nothing of DRAM
                    here = self._shards[key] = _Whereabouts(True)
                here = self._at_rest(here, action)
                self._demand(not here.on_device, action, "the shard is on the device already")
                self._demand(here.in_dram, action, "the shard is on disk; LOAD@host comes first")
                here.device, here.on_device, here.moving = action.device, True, True
                self._add(action.device, state, action)
            case ActionKind.SPILL | ActionKind.DROP if action.device == HOST:
                here = self._at_rest(here, action)
                self._demand(here.in_dram, action, "the shard is not in DRAM")
                self._demand(not here.on_device, action, "the shard is still on a device")
                here.moving = True
            case ActionKind.SPILL | ActionKind.DROP:
                here = self._at_rest(here, action)
                there = here.on_device and here.device == action.device
                self._demand(there, action, "the shard is not on the device")
                safe = action.kind is ActionKind.SPILL or not here.written
                safe |= action.trial in self._abandoned
                self._demand(safe, action, "its changes would be lost; SPILL writes them back")
                here.moving = True
            case ActionKind.SEND:
                pass
            case _:
                there = here is not None and here.on_device and here.device == action.device
                rule = "the shard is not on the device; LOAD comes before use"
                self._demand(there and not (here and here.moving), action, rule)
                self._add(action.device, self._activations.get(key, 0), action)

    def end(self, action: Action) -> None:
        """End an action that has begun."""
        key = (action.trial, action.shard)
        state = self._state.get(key, 0)
        here = self._shards.get(key)
        if here is None or action.kind is ActionKind.SEND:
            return
        if action.kind.computes:
            here.written |= action.kind is not ActionKind.F
            self._used[action.device] -= self._activations.get(key, 0)
            return
        here.moving = False
        if action.kind in (ActionKind.SPILL, ActionKind.DROP):
            self._used[action.device] -= state
            if action.device == HOST:
                here.in_dram = False
            else:
                here.on_device, here.written = False, False

    def abandon(self, trial: int) -> None:
        """Let the changes of a trial be lost, because it was cancelled or begins anew."""
        self._abandoned.add(trial)

    def lose(self, device: int) -> None:
        """Take everything off a device that died."""
        for here in self._shards.values():
            if here.on_device and here.device == device:
                here.on_device = here.moving = here.written = False
        self._used[device] = 0

    def _at_rest(self, here: _Whereabouts | None, action: Action) -> _Whereabouts:
        if here is None:
            raise InvalidSchedule(f"{action}: the shard is not on the device, nor anywhere else")
        self._demand(not here.moving, action, "the shard is being moved")
        return here

    def _demand(self, holds: bool, action: Action, rule: str) -> None:
        if not holds:
            raise InvalidSchedule(f"{action}: {rule}")

    def _add(self, place: Place, nbytes: int, action: Action) -> None:
        if place not in self._used:
            raise InvalidSchedule(f"{action}: there is no such device")
        self._used[place] += nbytes
        self.peak[place] = max(self.peak[place], self._used[place])
        budget = self.budgets[place]
        if budget is not None and self._used[place] > budget:
            raise InvalidSchedule(
                f"{action}: {self._used[place]} bytes are resident, but the budget is {budget}"
            )
