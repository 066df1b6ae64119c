"""Lowers a compute-only order of several devices into actions that also move the shards.

A static schedule lists what each device computes; the result brings every shard before its use and
takes off what is used last. With double buffering the next shard of a device is loaded before the
task that comes before it, as far as the budget allows. For two shards and room for one::

    order     s0F0                      s1F0 s1B0 s1U0                 s0B0 ...
    lowered   s0LOAD s0F0 s0DROP s1LOAD s1F0 s1B0 s1U0 s1SPILL s0LOAD s0B0 ...

The shell of a static schedule carries the result out; the queues of ``WorkerState`` decide the same
things one by one, because they don't know the order beforehand.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.run_progress import RunSpec
from cerebro_hydra.plan.tiers import Key


def lower(
    order: Sequence[Action],
    specs: Mapping[int, RunSpec],
    budgets: Sequence[int | None],
    *,
    double_buffering: bool = True,
) -> list[Action]:
    """Return the order with RECV, LOAD, SPILL, DROP and SEND, within the devices' budgets.

    Args:
        order: computing tasks that name their devices; each comes after what it waits for.
        specs: the runs by their number.
        budgets: the bytes of each device; None means no limit.

    Raises:
        InvalidSchedule: a task needs more bytes than its device has.
    """
    return _Lowering(order, specs, budgets).result(double_buffering)


class _Lowering:
    """Holds where the shards are while an order is lowered."""

    def __init__(
        self, order: Sequence[Action], specs: Mapping[int, RunSpec], budgets: Sequence[int | None]
    ) -> None:
        self._order, self._specs = order, specs
        self._budgets = [math.inf if budget is None else budget for budget in budgets]
        self._on: list[dict[Key, int]] = [{} for _ in budgets]  # bytes by shard
        self._written: set[Key] = set()
        self._received: set[Key] = set()
        self._uses: dict[Key, deque[int]] = {}  # the places in the order that are still to come
        self._tasks: list[deque[int]] = [deque() for _ in budgets]
        for place, task in enumerate(order):
            self._uses.setdefault(_key(task), deque()).append(place)
            self._tasks[_device(task)].append(place)
        self._actions: list[Action] = []

    def result(self, double_buffering: bool) -> list[Action]:
        for task in self._order:
            key, device = _key(task), _device(task)
            self._uses[key].popleft()
            self._tasks[device].popleft()
            work = self._specs[task.trial].shards[task.shard].activations
            if not self._bring(key, device, work, keep={key}, beyond=-1):
                raise InvalidSchedule(
                    f"{task}: the shard has {self._bytes(key)} bytes and the task {work}, but "
                    f"device {device} has only {self._budgets[device]}"
                )
            if double_buffering:
                self._prefetch(key, device, work)
            self._actions.append(task)
            if task.kind is not ActionKind.F:
                self._written.add(key)
            if task.kind is ActionKind.U and not self._uses[key]:
                self._leave(key, device)
                self._actions.append(Action(*key, ActionKind.SEND))
        return self._actions

    def _prefetch(self, key: Key, device: int, work: int) -> None:
        """Load the device's next shard, unless another device uses it before."""
        for place in self._tasks[device]:
            following = _key(self._order[place])
            if following != key:
                if self._uses[following][0] == place:
                    self._bring(following, device, work, keep={key, following}, beyond=place)
                return

    def _bring(self, key: Key, device: int, work: int, keep: set[Key], beyond: int) -> bool:
        """Return whether the shard is there beside ``work``, after what can go has gone."""
        here = self._on[device]
        need = work + (0 if key in here else self._bytes(key))
        spare = sorted((k for k in here if k not in keep), key=self._next_use, reverse=True)
        movable = [k for k in spare if self._next_use(k) > beyond]
        free = self._budgets[device] - sum(here.values())
        if free + sum(here[k] for k in movable) < need:
            return False
        for other in movable:
            if free >= need:
                break
            free += here[other]
            self._leave(other, device)
        if key not in here:
            for elsewhere, shards in enumerate(self._on):
                if key in shards:
                    self._leave(key, elsewhere)
            if key not in self._received:
                self._received.add(key)
                self._actions.append(Action(*key, ActionKind.RECV))
            self._actions.append(Action(*key, ActionKind.LOAD, device=device))
            here[key] = self._bytes(key)
        return True

    def _leave(self, key: Key, device: int) -> None:
        kind = ActionKind.SPILL if key in self._written else ActionKind.DROP
        self._written.discard(key)
        del self._on[device][key]
        self._actions.append(Action(*key, kind, device=device))

    def _next_use(self, key: Key) -> float:
        return self._uses[key][0] if self._uses[key] else math.inf

    def _bytes(self, key: Key) -> int:
        return self._specs[key[0]].shards[key[1]].state


def _key(task: Action) -> Key:
    return task.trial, task.shard


def _device(task: Action) -> int:
    if task.device is None:
        raise InvalidSchedule(f"{task}: no device is named; end it in one, such as @0")
    return task.device
