"""A visit is a sub-epoch or an evaluation at a worker, whose tasks devices do in units.

Its schedule says in which order and where. A list of tasks is done by one device at a time, or by
one device alone if the schedule has a list for each; several lists go on at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Literal

from cerebro_hydra.plan.messages.actions import Action, ActionKind, Part
from cerebro_hydra.plan.queues.ledger import BlockKey, state_key
from cerebro_hydra.plan.queues.outlook import MOST_UNITS
from cerebro_hydra.plan.queues.visit_spec import Share, VisitSpec

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U

MOST_STAYING_TASKS = 12 * MOST_UNITS
"""Of how many tasks it is asked in which parts they stay on a device, which costs time for each."""

_TOO_MANY = (0.0,) * (MOST_UNITS + 1)


@dataclass(frozen=True, slots=True)
class Unit:
    """Tasks of one visit that a device runs one after the other.

    They are of one shard, unless all shards of the visit stay on the device.

    Args:
        keys: of the states that the tasks work on, in the order of their first tasks.
        parts: of each of these states, those that the tasks need.
        seconds: that all tasks take, as far as is known.
    """

    tasks: tuple[Action, ...]
    keys: tuple[BlockKey, ...]
    parts: tuple[frozenset[Part], ...]
    seconds: float
    starts_microbatch: bool
    ends_microbatch: bool

    @property
    def visit(self) -> int:
        """Return the number of the visit."""
        return self.tasks[0].trial


Status = Literal["waiting", "open", "restarting", "cancelled"]


@dataclass(slots=True)
class TaskList:
    """Holds the tasks of a visit that one device does at a time, in the order of the schedule.

    Args:
        units: those that a device was given, and the one that is reserved behind them there.
        device: the one that has these units, if there are any.
        following: the unit after them, while it is ``known``; None if there is none, or not yet.
    """

    left: deque[Action] = field(default_factory=deque)
    units: list[Unit] = field(default_factory=list)
    device: int = -1
    following: Unit | None = None
    known: bool = False


class Visit:
    """Knows which tasks of a visit are left and how long they will take.

    ``is_alive`` tells whether a device is; any other may go on for one that is not.
    """

    def __init__(
        self,
        spec: VisitSpec,
        arrival: int,
        is_alive: Callable[[int], bool] = lambda device: True,
    ) -> None:
        self.spec = spec
        self.shares = spec.shares()
        self._list_of = {k: n for n, share in enumerate(self.shares) for k in share.shards}
        self.most_open = spec.most_open
        self._list_at = {
            device: n for n, device in enumerate(spec.places or range(len(self.shares)))
        }
        self._is_alive = is_alive
        self.arrival = arrival  # among the visits of the worker
        self.status: Status = "waiting"
        self._seconds = {
            (kind, number): shard.seconds(kind)
            for number, shard in enumerate(spec.shards)
            for kind in (F, B, U)
        }
        self.begin()

    def begin(self) -> None:
        """Begin at the first task."""
        self.lists = [TaskList() for _ in self.shares]
        self.microbatch: int | None = None  # the newest that has begun
        self.staying: set[int] = set()  # the devices where it stays
        self.waiting_since = 0  # the event at which its last unit ended
        self.absent = set(range(self.spec.graph.shards))
        self.sent: set[int] = set()
        self._windows = 0  # whose tasks were taken from the schedule
        self._newest_window = 0  # of those that units were taken from
        self._undone: set[Action] = set()  # tasks of these windows, if there are several lists
        self._remaining: float | None = None
        self._parts: tuple[float, ...] | None = None

    @property
    def units(self) -> list[Unit]:
        """Return the units that devices were given, and what is reserved."""
        return [unit for each in self.lists for unit in each.units]

    def uses(self, key: BlockKey) -> bool:
        """Return whether a unit that a device was given, or that is reserved, works on a block."""
        return any(key in unit.keys for each in self.lists for unit in each.units)

    @property
    def has_places(self) -> bool:
        """Return whether its schedule says which device does what."""
        return len(self.lists) > 1

    @property
    def devices(self) -> Iterable[int]:
        """Return the devices of its lists, if there are several."""
        return self._list_at

    def list_on(self, device: int) -> TaskList | None:
        """Return the tasks that a device may take from; None if there are none for it.

        The one list of a visit whose place has died is any device's. It comes back when that device
        does, unless a microbatch stays elsewhere by then.
        """
        if device in self._list_at:
            return self.lists[self._list_at[device]]
        if self.has_places:
            return None
        free = not self.spec.places or not self._is_alive(self.spec.places[0])
        return self.lists[0] if free or device in self.staying else None

    def share_on(self, device: int) -> Share:
        """Return what a device needs for its part."""
        return self.shares[self._list_at[device] if self.has_places else 0]

    def begins_window_on(self, device: int) -> bool:
        """Return whether the next task is the first of a window that other devices have begun."""
        if not self.has_places:
            return False
        left = self.lists[self._list_at[device]].left
        return bool(left) and self._starts(left[0])

    def is_ahead_of(self, unit: Unit) -> bool:
        """Return whether another device has begun a later window than that of a unit."""
        return self.has_places and self._window_of(unit.tasks[-1]) < self._newest_window

    def _window_of(self, task: Action) -> int:
        return (task.microbatch or 0) // self.spec.graph.window

    def can_redo(self, task: Action) -> bool:
        """Return whether the boundary values of a task that was done are still there."""
        return (task.microbatch or 0) > (self.microbatch or 0) - self.most_open

    def changes_home(self, task: Action) -> bool:
        """Return whether a task changes what DRAM has of its shard, so that it is done but once."""
        return task.kind is U and self.spec.updates_at_home

    @property
    def remaining(self) -> float:
        """Return the seconds of all tasks that no unit has taken."""
        if self._remaining is None:
            spec, graph = self.spec, self.spec.graph
            begun = min(self._windows * graph.window, graph.microbatches)
            kinds = (F, B) if graph.training else (F,)
            microbatch = sum(self._seconds[kind, k] for kind in kinds for k in range(graph.shards))
            update = sum(self._seconds[U, k] for k in range(graph.shards)) if graph.training else 0
            self._remaining = (
                spec.later_seconds
                + sum(self._seconds[t.kind, t.shard] for each in self.lists for t in each.left)
                + microbatch * (graph.microbatches - begun)
                + update * (graph.windows - self._windows)
            )
        return self._remaining

    @property
    def is_coming(self) -> bool:
        """Return whether it still waits for room, or for shards."""
        return self.status == "waiting" or (self.status == "open" and bool(self.absent))

    @property
    def done(self) -> bool:
        """Return whether every task is done."""
        return not any(each.units or self._tasks(each) for each in self.lists)

    @property
    def is_summed(self) -> bool:
        """Return whether it is an evaluation that ends soon, whose sums a device has until then."""
        return not self.spec.graph.training and self.spec.stays and self.done

    @property
    def devices_left(self) -> list[int]:
        """Return the devices that have tasks left, of a schedule that says which does what.

        The first devices of an evaluation may end before the last ones have begun.
        """
        more = not self.is_in_last_window
        left = [bool(more or each.units or each.left) for each in self.lists]
        return [device for device, number in self._list_at.items() if left[number]]

    @property
    def is_in_last_window(self) -> bool:
        """Return whether no window is left after the one that tasks are taken from."""
        return self._windows == self.spec.graph.windows

    def next_unit(self, tasks: TaskList) -> Unit | None:
        """Return the unit of a list after those under way; None if it is not ready, or none is."""
        if not tasks.known:
            tasks.following = self._following(tasks)
            tasks.known = True
        return tasks.following

    def _following(self, tasks: TaskList) -> Unit | None:
        left = self._tasks(tasks)
        if not left or not self._is_ready(left[0]):
            return None
        unit = [left[0]]
        for task in islice(left, 1, 3):
            if not (self._fuses(unit[-1], task) and self._is_ready(task)):
                break
            unit.append(task)
        alone = self.spec.fused and self.spec.stays and not self.spec.is_pipelined
        if alone and self.microbatch is not None:
            self._lengthen(unit, left)
        return self._unit(unit, next(islice(left, len(unit), None), None))

    def _fuses(self, before: Action, task: Action) -> bool:
        """Return whether a task is of the same unit as the one before it."""
        if task.shard != before.shard:
            return False
        if self.spec.fused and before.kind is F and task.kind is B:
            last = self.spec.graph.shards - 1
            return task.shard == last and task.microbatch == before.microbatch
        return task.kind is U and before.kind is B

    @property
    def bound_to(self) -> set[int]:
        """Return the devices that alone may go on with it, because it stays there for now."""
        units = self.units
        return set() if units and units[-1].ends_microbatch else self.staying

    def parts_left(self, most: int) -> tuple[float, ...] | None:
        """Return the seconds of what is left in parts; None if there are more than ``most``.

        A device that begins a part does all of it: a unit, or what stays there with its microbatch.
        """
        if self._parts is None:
            self._parts = self._parted()
        return self._parts if len(self._parts) <= most else None

    def _parted(self) -> tuple[float, ...]:
        """Return the parts, or too many where there are too many tasks to look at them."""
        graph, first = self.spec.graph, self._windows
        kinds = 3 if graph.training else 1
        begun = min(first * graph.window, graph.microbatches)
        tasks = len(self.lists[0].left) + (graph.microbatches - begun) * graph.shards * kinds
        if tasks > (MOST_STAYING_TASKS if self.spec.stays else 3 * MOST_UNITS):
            return _TOO_MANY
        goes_on = self._goes_on if self.spec.stays else self._fuses
        parts: list[float] = []
        before: Action | None = None
        later = (self.spec.lists(window)[0] for window in range(first, graph.windows))
        for task in chain(self.lists[0].left, *later):
            seconds = self._seconds[task.kind, task.shard]
            if before is not None and goes_on(before, task):
                parts[-1] += seconds
            else:
                parts.append(seconds)
            before = task
        return tuple(parts)

    def _is_ready(self, task: Action) -> bool:
        """Return whether no task of another list is left that comes before this one.

        A list has its own tasks in an order that `TaskGraph.needs` allows, as ``validate`` checks;
        so one that has all of them is never asked. A new microbatch waits for the tasks of that
        whose boundary values it replaces: for those of other devices, and for its own device's if
        they may be done again.
        """
        if not self.has_places:
            return True
        own = self._list_of[task.shard]
        needs = (need for need, _ in self.spec.graph.needs(task))
        if any(self._list_of[n.shard] != own and n in self._undone for n in needs):
            return False
        replaced = (task.microbatch or 0) - self.most_open
        return (
            task.kind is not F
            or task.shard > 0
            or not any(
                (each.microbatch or 0) <= replaced
                for each in self._undone
                if each.kind is not U and not (self.spec.stays and self._list_of[each.shard] == own)
            )
        )

    def _lengthen(self, unit: list[Action], left: deque[Action]) -> None:
        """Add the tasks that follow, while all of them take less than `unit_seconds`.

        Where it can, a unit ends with a microbatch, after which other visits may stay on the
        device. The shards of the last window are published one by one, so each has units of its own
        there, and so has each while one has no room in DRAM yet, which is made for the next task
        alone.
        """
        last = self.spec.graph.window_of(self.spec.graph.microbatches - 1)
        seconds = sum(self._seconds[task.kind, task.shard] for task in unit)
        end = 0
        while len(unit) < len(left) or self._take_window():
            task = left[len(unit)]
            if not self._goes_on(unit[-1], task):
                end = len(unit)
            seconds += self._seconds[task.kind, task.shard]
            whole = self.spec.keeps_all and not self.absent and task.microbatch not in last
            if seconds > self.spec.unit_seconds or not (whole or task.shard == unit[0].shard):
                del unit[end or len(unit) :]
                return
            unit.append(task)

    def take(self, unit: Unit, device: int = 0) -> None:
        """Take the next unit off the tasks that are left, for a device."""
        tasks = self.lists[self._list_of[unit.tasks[0].shard]]
        for _ in unit.tasks:
            tasks.left.popleft()
        tasks.units.append(unit)
        tasks.device = device
        self._newest_window = max(self._newest_window, self._window_of(unit.tasks[-1]))
        self._changed()

    def began(self, unit: Unit) -> None:
        """Note that a device was given a unit, and begins with it maybe at once."""
        self.microbatch = max(unit.tasks[-1].microbatch or 0, self.microbatch or 0)
        self._changed()

    def received(self, shard: int) -> None:
        """Note that a shard has room in DRAM."""
        self.absent.remove(shard)
        self._changed()

    def end(self, unit: Unit) -> None:
        """Note that a unit is under way no longer, or not reserved."""
        self.lists[self._list_of[unit.tasks[0].shard]].units.remove(unit)

    def put_back(self, tasks: Iterable[Action]) -> None:
        """Put back tasks that have to be done again; others of their lists come after them."""

        def place(task: Action) -> tuple[int, int]:
            window = self._window_of(task)
            while task not in (mine := self.spec.lists(window)[self._list_of[task.shard]]):
                window -= 1  # a forward may come before the update of a window before its own
            return window, mine.index(task)

        for task in sorted(tasks, key=place, reverse=True):
            self.lists[self._list_of[task.shard]].left.appendleft(task)
            if self.has_places:
                self._undone.add(task)
        self._changed()

    def finish(self, task: Action, seconds: float) -> None:
        """Note that a task is done, and expect of the same kind of task what this one took."""
        self._undone.discard(task)
        if self._seconds[task.kind, task.shard] != seconds or self.has_places:
            self._seconds[task.kind, task.shard] = seconds
            self._changed()

    def next_use(self, shard: int) -> float:
        """Return how many tasks come before the shard's next one; infinity if none is left.

        They are those of its list, and one of another list for which that list is waiting. So what
        is ready is always nearer than what waits, and DRAM goes to it.
        """
        left = self._tasks(self.lists[self._list_of[shard]])
        waits_for = 0 if not left or self._is_ready(left[0]) else 1
        for distance, task in enumerate(left, start=waits_for):
            if task.shard == shard:
                return distance
        more = self._windows < self.spec.graph.windows
        return len(left) + shard if more else math.inf

    def _tasks(self, tasks: TaskList) -> deque[Action]:
        while not tasks.left and self._take_window():
            pass
        return tasks.left

    def _take_window(self) -> bool:
        """Take the tasks of the next window from the schedule; return whether there is one."""
        if self._windows == self.spec.graph.windows:
            return False
        for mine, tasks in zip(self.lists, self.spec.lists(self._windows), strict=True):
            mine.left.extend(tasks)
            if self.has_places:
                self._undone.update(tasks)
        self._windows += 1
        self._changed()
        return True

    def _changed(self) -> None:
        """Forget what followed from how things were."""
        self._remaining = None
        self._parts = None
        for each in self.lists:
            each.known = False

    def _unit(self, tasks: list[Action], following: Action | None) -> Unit:
        """Return a unit; ``following`` is the task after it, None at the end of a window."""
        needed: dict[int, frozenset[Part]] = {}
        for task in tasks:
            needed[task.shard] = needed.get(task.shard, frozenset()) | self.spec.read(task)
        return Unit(
            tuple(tasks),
            tuple(state_key(self.spec.visit, shard) for shard in needed),
            tuple(needed.values()),
            sum(self._seconds[task.kind, task.shard] for task in tasks),
            starts_microbatch=self._starts(tasks[0]),
            ends_microbatch=not self._goes_on(tasks[-1], following),
        )

    def _starts(self, task: Action) -> bool:
        """Return whether a task is the first of its microbatch, or a pipelined window, there."""
        if not self.spec.is_pipelined:
            return task.kind is F and task.shard == 0
        first = self.shares[self._list_of[task.shard]].shards[0]
        together = self.spec.graph.flushed_with(task.microbatch or 0)
        return task.kind is F and task.shard == first and task.microbatch == together.start

    def _goes_on(self, task: Action, following: Action | None) -> bool:
        """Return whether a microbatch that stays on a device goes on after a task.

        Gradients of a tied parameter are summed where all microbatches of its window run, and an
        evaluation is summed where all of its batches do. A pipelined window stays as a whole, and
        so does all of a sub-epoch that is not flushed in between.
        """
        graph = self.spec.graph
        if not graph.training or graph.staleness:
            return following is not None or not self.is_in_last_window
        if following is None or not (graph.tied or self.spec.is_pipelined):
            return following is not None and following.microbatch == task.microbatch
        return following.microbatch in graph.window_of(task.microbatch or 0)


def on_least_busy(
    spec: VisitSpec, alive: Sequence[bool], budgets: Sequence[float], visits: Iterable[Visit]
) -> VisitSpec:
    """Return a visit with a device for each list, where it has several and fewer than devices.

    They are devices that have room for any of its lists, are alive, and have the least work of the
    worker's visits. Where too few have room, it stays as it is.
    """
    lists = len(spec.lists(0))
    if spec.places or not 1 < lists < len(alive):
        return spec
    need = max(share.need for share in spec.shares())
    roomy = [number for number, budget in enumerate(budgets) if budget >= need]
    if len(roomy) < lists:
        return spec
    work = [0.0] * len(alive)
    for visit in visits:
        for device in visit.devices if visit.has_places else visit.spec.places:
            work[device] += visit.remaining / len(visit.lists)
    roomy.sort(key=lambda number: (not alive[number], work[number], number))
    return replace(spec, places=tuple(sorted(roomy[:lists])))


def placed(unit: Unit, device: int) -> tuple[Action, ...]:
    """Return the unit's tasks on a device."""
    return tuple(
        Action(task.trial, task.shard, task.kind, task.microbatch, device) for task in unit.tasks
    )


def unplaced(task: Action) -> Action:
    """Return a task as it is in its unit."""
    return Action(task.trial, task.shard, task.kind, task.microbatch)
