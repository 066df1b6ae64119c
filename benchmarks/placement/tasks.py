"""Turns a placed trial into timed tasks, of which a search can simulate thousands of plans.

They are coarser than what the queues of a worker do, which decide in the end between the plans that
a search has found. A device has three lanes: one computes, one brings shards, one writes them back.
A trial that its device holds as a whole is brought once. Otherwise a shard is written back after a
backward, if the next unit is of another one, and each unit waits for those parts of its shard that
are not there. They can come when the unit before the last has ended, and when what was written
back has left them room. A long sub-epoch has a few windows that are as many times longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.placement.timeline import TimedTask
from cerebro_hydra.plan.messages.actions import Action, ActionKind, Part
from cerebro_hydra.plan.queues.visit_spec import VisitSpec

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U

COMPUTE, LOAD, SPILL = range(3)  # the lanes of a device

MOST_MICROBATCHES = 8
"""Of so many microbatches, or of one window, tasks are made; more of them make those longer."""


@dataclass(frozen=True, slots=True)
class ListTask:
    """Describes a task of a visit whose lists are on no device yet.

    Args:
        place: the list that does it.
        lane: of its device.
        seconds: that it takes.
        after: the tasks before it, by their places in the visit.
    """

    place: int
    lane: int
    seconds: float
    after: tuple[int, ...]


def tasks_of(visit: VisitSpec, budget: int | None, rate: float) -> tuple[ListTask, ...]:
    """Return the tasks of a visit, each after those that it waits for.

    Args:
        budget: the bytes of each device; None means no limit.
        rate: the bytes per second that come to a device.
    """
    graph = visit.graph
    windows = max(1, min(graph.windows, MOST_MICROBATCHES // graph.window))
    microbatches = min(graph.microbatches, windows * graph.window)
    stretched = graph.microbatches / microbatches
    shorter = replace(visit, graph=replace(graph, microbatches=microbatches))
    limit = math.inf if budget is None else budget
    if visit.is_pipelined:
        return tuple(_pipelined(shorter, stretched, rate))
    return tuple(_sequential(shorter, stretched, rate, limit))


def on_lanes(
    tasks: Sequence[ListTask], devices: Sequence[int], first: int
) -> Mapping[int, TimedTask]:
    """Return tasks by their numbers, which count from ``first``, on the lanes of devices."""
    return {
        first + number: TimedTask(
            3 * devices[task.place] + task.lane,
            task.seconds,
            tuple(first + each for each in task.after),
        )
        for number, task in enumerate(tasks)
    }


def _sequential(
    visit: VisitSpec, stretched: float, rate: float, limit: float
) -> Iterator[ListTask]:
    """Yield the units of a chain of tasks, and what is brought and written back for them."""
    whole = visit.whole_need <= limit
    before: tuple[int, ...] = ()
    if whole and (brought := visit.state_bytes / rate):
        yield ListTask(0, LOAD, brought, ())
        before = (0,)
    number = len(before)
    device = _ShardsOnDevice(visit, limit)
    ended: deque[int] = deque(maxlen=2)  # the last two units
    units = [unit for w in range(visit.graph.windows) for unit in _units(visit, w, whole)]
    for unit, following in zip(units, [*units[1:], None], strict=True):
        after = (*before, ended[-1]) if ended else before
        before = ()
        if not whole:
            nbytes, room = device.bring(unit)
            if brought := nbytes / rate * stretched:
                yield ListTask(0, LOAD, brought, (*room, *tuple(ended)[:-1]))
                after = (*after, number)
                number += 1
        if seconds := sum(visit.shards[t.shard].seconds(t.kind) for t in unit) * stretched:
            yield ListTask(0, COMPUTE, seconds, after)
            ended.append(number)
            number += 1
        else:
            before = after
        stays = following is None or following[0].shard == unit[0].shard
        if not whole and unit[-1].kind is not F and not stays:
            nbytes = device.write_back(unit[0].shard, number)
            if written := nbytes / rate * stretched:
                yield ListTask(0, SPILL, written, (ended[-1],) if ended else ())
                number += 1


def _units(visit: VisitSpec, window: int, whole: bool) -> Iterator[list[Action]]:
    """Yield the tasks of a window that go on with the shards that they have."""
    unit: list[Action] = []
    (tasks,) = visit.lists(window)
    for task in tasks:
        begins = task.microbatch != unit[-1].microbatch if unit and whole else True
        if unit and begins and (whole or task.shard != unit[-1].shard):
            yield unit
            unit = []
        unit.append(task)
    yield unit


class _ShardsOnDevice:
    """Knows which shards of a visit a device has, of which that goes which was used longest ago.

    A chain of tasks goes through the shards and back, so no other one is used again later.
    """

    def __init__(self, visit: VisitSpec, limit: float) -> None:
        self._visit = visit
        self._free = limit - visit.held_bytes - max(shard.activations for shard in visit.shards)
        self._here: dict[int, int] = {}  # bytes by shard, in the order of their last use
        self._leaving: deque[tuple[int, int]] = deque()  # bytes, and the task that writes them

    def bring(self, unit: Sequence[Action]) -> tuple[int, tuple[int, ...]]:
        """Return the bytes that come for a unit, and the tasks that make room for them."""
        shard = unit[0].shard
        sizes = self._visit.shards[shard].sizes
        parts = frozenset[Part]().union(*map(self._visit.read, unit))
        had = self._here.pop(shard, 0)
        need = max(had, sum(nbytes for part, nbytes in sizes.items() if part in parts))
        self._free += had - need
        room = []
        while self._free < 0 and (self._leaving or self._here):
            if self._leaving:
                nbytes, task = self._leaving.popleft()
                room.append(task)
            else:
                nbytes = self._here.pop(next(iter(self._here)))
            self._free += nbytes
        self._here[shard] = need
        return need - had, tuple(room)

    def write_back(self, shard: int, task: int) -> int:
        """Return the bytes that a task writes back, whose room comes free then."""
        nbytes = self._here.pop(shard)
        if nbytes:
            self._leaving.append((nbytes, task))
        return nbytes


def _pipelined(visit: VisitSpec, stretched: float, rate: float) -> Iterator[ListTask]:
    """Yield the tasks of all lists, each after those of `TaskGraph.needs` and the one before."""
    ends: dict[Action, tuple[int, ...]] = {}
    number = 0
    last: list[tuple[int, ...]] = []
    for place, share in enumerate(visit.shares()):
        last.append(())
        if brought := share.state / rate:
            yield ListTask(place, LOAD, brought, ())
            last[place] = (number,)
            number += 1
    for window in range(visit.graph.windows):
        lists = [deque(tasks) for tasks in visit.lists(window)]
        while any(lists):
            for place, tasks in enumerate(lists):
                while tasks and all(need in ends for need, _ in visit.graph.needs(tasks[0])):
                    task = tasks.popleft()
                    waits = (ends[need] for need, _ in visit.graph.needs(task))
                    after = tuple(dict.fromkeys(n for each in (last[place], *waits) for n in each))
                    seconds = visit.shards[task.shard].seconds(task.kind) * stretched
                    if seconds:
                        yield ListTask(place, COMPUTE, seconds, after)
                        after = (number,)
                        number += 1
                    ends[task] = last[place] = after
