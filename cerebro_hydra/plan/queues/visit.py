"""A visit is a sub-epoch or an evaluation at a worker, whose tasks devices do in units.

Its schedule says in which order and where. A list of tasks is done by one device at a time, or by
one device alone if the schedule has a list for each; several lists go on at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Literal

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.ledger import BlockKey, StateName, state_key
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import SCHEDULES, is_pipelined

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U

UNIT_SECONDS = 0.05
"""Tasks that take less together are one unit if they can be, because each unit costs messages."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """Describes a shard by bytes and estimated seconds.

    Args:
        state: bytes of parameters, buffers, gradients and optimizer state; with slots of fixed
            size, those of a slot.
        activations: bytes that a task of one microbatch has beside the state, at its peak.
        boundary: bytes of one microbatch's input and of its gradient, or of all that its tasks
            leave in DRAM where a microbatch may go to other devices.
        forward, backward, update: seconds of a task, until they have been measured.
        forward_writes: whether a forward changes the state, as BatchNorm's statistics do.
    """

    state: int
    activations: int = 0
    boundary: int = 0
    forward: float = 1.0
    backward: float = 2.0
    update: float = 0.0
    forward_writes: bool = False

    def seconds(self, kind: ActionKind) -> float:
        """Return the estimated seconds of a task."""
        return {F: self.forward, B: self.backward, U: self.update}[kind]


@dataclass(frozen=True, slots=True)
class Share:
    """Tells what a device needs for its part of a visit.

    A visit that stays on a device has ``held`` there from the first to the last task of a
    microbatch, or of a window if it is pipelined.

    Args:
        shards: whose tasks the device does.
        state: bytes of these shards.
        held: bytes beside the shards.
        need: bytes that the device must have.
        pinned: bytes that nobody else can have while the visit stays.
    """

    shards: tuple[int, ...]
    state: int
    held: int
    need: int
    pinned: int


@dataclass(frozen=True, slots=True)
class VisitSpec:
    """Describes a visit.

    Args:
        visit: the number that its actions carry as their trial. It is not the trial's own number,
            because a worker may evaluate a trial on two partitions at once.
        by_modules: a microbatch stays on one device, which also holds its boundary values, as it
            must where the model is cut by modules. Else any device may take its next unit, and
            the boundary values are in DRAM from unit to unit.
        recompute: shards may leave the device between the tasks of a microbatch, so that a backward
            computes its forward again. Otherwise a microbatch stays on one device, with all shards
            and activations; an evaluation, too, on a device that no shard has to leave.
        fused: forward and backward of the last shard are one unit, with its activations kept.
        later_seconds: the work of the trial after this visit, by which it is preferred.
        schedule: a name of `SCHEDULES`, which says what is done in which order.
        devices: how many devices such a schedule may spread the visit over.
        unit_seconds: what the tasks take at most that a device does without a message in between.
        source: the trial and the state that it begins with, if that is kept (``Ledger.keep``).

    Raises:
        ValueError: microbatches that stay on one device can't be pipelined.
    """

    visit: int
    graph: TaskGraph
    shards: tuple[ShardSpec, ...]
    by_modules: bool = False
    recompute: bool = True
    fused: bool = True
    later_seconds: float = 0.0
    schedule: str = "sequential"
    devices: int = 1
    unit_seconds: float = UNIT_SECONDS
    source: StateName | None = None

    def __post_init__(self) -> None:
        """Refuse a schedule that the cut can't follow."""
        if self.is_pipelined and (self.by_modules or not self.graph.training):
            what = "a cut by modules" if self.by_modules else "an evaluation"
            raise ValueError(f"visit {self.visit} is {what}, which {self.schedule} can't pipeline")

    @property
    def is_pipelined(self) -> bool:
        """Return whether several microbatches may be under way at once."""
        return is_pipelined(self.schedule)

    def lists(self, window: int) -> Sequence[Sequence[Action]]:
        """Return the tasks of a window: a list for each device, or one for whichever is free."""
        return SCHEDULES[self.schedule](self.graph, self.visit, window, self.devices)

    @property
    def most_open(self) -> int:
        """Return how many microbatches are between first forward and last backward at once."""
        if not self.is_pipelined:
            return 1
        first = [task for task in self.lists(0)[0] if task.shard == 0]
        return max(accumulate((task.kind is F) - (task.kind is B) for task in first))

    @property
    def moves(self) -> bool:
        """Return whether boundary values are in DRAM from unit to unit, for other devices too."""
        return self.is_pipelined or not self.stays

    @property
    def stays(self) -> bool:
        """Return whether what a task keeps for later ones stays on its device."""
        return self.by_modules or not self.recompute

    @property
    def keeps_all(self) -> bool:
        """Return whether shards and activations stay on a device with a microbatch or window."""
        return not self.recompute

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all shards."""
        return sum(shard.state for shard in self.shards)

    @property
    def boundary_bytes(self) -> int:
        """Return the bytes of a microbatch's boundary values."""
        return sum(shard.boundary for shard in self.shards)

    def shares(self) -> tuple[Share, ...]:
        """Return what each device of the schedule needs, or whichever device does all of it."""
        if not self.is_pipelined:
            kept = sum(shard.activations for shard in self.shards)
            return (self._share(range(len(self.shards)), kept),)
        return tuple(
            self._share(sorted({task.shard for task in tasks}), self._most_kept(tasks))
            for tasks in self.lists(0)
        )

    def _share(self, shards: Sequence[int], kept: int) -> Share:
        """Return what a device needs that does the tasks of these shards."""
        mine = [self.shards[number] for number in shards]
        state = sum(shard.state for shard in mine)
        if self.keeps_all:
            if self.is_pipelined:
                kept += self.most_open * self.boundary_bytes + self._transient(shards)
            return Share(tuple(shards), state, kept, state + kept, state + kept)
        held = self.boundary_bytes if self.stays else 0
        need = held + max(shard.state + shard.activations for shard in mine)
        return Share(tuple(shards), state, held, need, held)

    def _transient(self, shards: Sequence[int]) -> int:
        """Return the most bytes that a task of these shards has beside what it keeps for later.

        Where activations are kept, those of the last shard have the peak of all tasks.
        """
        return 0 if len(self.shards) - 1 in shards else self.shards[-1].activations

    def _most_kept(self, tasks: Sequence[Action]) -> int:
        """Return the most bytes of activations that are kept at once from F to B."""
        signs = {F: 1, B: -1, U: 0}
        kept = (signs[task.kind] * self.shards[task.shard].activations for task in tasks)
        return max(accumulate(kept))

    @property
    def held_bytes(self) -> int:
        """Return the most bytes that a device keeps beside the state while the visit stays."""
        return max(share.held for share in self.shares())

    @property
    def device_need(self) -> int:
        """Return the bytes that the device with the largest share must have."""
        return max(share.need for share in self.shares())

    @property
    def task_bytes(self) -> tuple[int, ...]:
        """Return the bytes beside the shards that tasks of each shard may have for a microbatch."""
        held = {shard: share.held for share in self.shares() for shard in share.shards}
        if self.keeps_all and self.is_pipelined:
            for share in self.shares():
                kept = sum(self.shards[number].activations for number in share.shards)
                most = kept + self.boundary_bytes + self._transient(share.shards)
                held |= dict.fromkeys(share.shards, most)
        if self.keeps_all:
            return tuple(held[number] for number in range(len(self.shards)))
        return tuple(held[number] + each.activations for number, each in enumerate(self.shards))

    def buffered_need(self, buffers: int) -> int:
        """Return the bytes of a device with room for so many shards, of which one computes."""
        if self.keeps_all:
            return self.device_need
        return self.held_bytes + max(
            buffers * shard.state + shard.activations for shard in self.shards
        )

    @property
    def whole_need(self) -> int:
        """Return the bytes of a device that never gives a shard of its share away."""
        largest = 0 if self.keeps_all else max(shard.activations for shard in self.shards)
        return max(share.state + share.held for share in self.shares()) + largest

    @property
    def host_boundary_bytes(self) -> int:
        """Return the bytes of DRAM for the boundary values of microbatches that move about."""
        return self.most_open * self.boundary_bytes if self.moves else 0

    @property
    def host_need(self) -> int:
        """Return the bytes of DRAM without which a worker refuses the visit."""
        return self.host_state_bytes + self.host_boundary_bytes

    @property
    def host_state_bytes(self) -> int:
        """Return the bytes of DRAM without which the visit can't go on; it is a shard's home."""
        return self.state_bytes if self.keeps_all else max(shard.state for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Unit:
    """Tasks of one visit that a device runs one after the other.

    They are of one shard, unless all shards of the visit stay on the device.

    Args:
        keys: of the states that the tasks work on, in the order of their first tasks.
    """

    tasks: tuple[Action, ...]
    keys: tuple[BlockKey, ...]
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
        units: those under way and the one that is reserved behind them on the same device.
        following: the unit after them, while it is ``known``; None if there is none, or not yet.
    """

    left: deque[Action] = field(default_factory=deque)
    units: list[Unit] = field(default_factory=list)
    following: Unit | None = None
    known: bool = False


class Visit:
    """Knows which tasks of a visit are left and how long they will take."""

    def __init__(self, spec: VisitSpec, arrival: int) -> None:
        self.spec = spec
        self.shares = spec.shares()
        self._list_of = {k: n for n, share in enumerate(self.shares) for k in share.shards}
        self.most_open = spec.most_open
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

    @property
    def units(self) -> list[Unit]:
        """Return the units that are under way and reserved."""
        return [unit for each in self.lists for unit in each.units]

    def uses(self, key: BlockKey) -> bool:
        """Return whether a unit that is under way or reserved works on a block."""
        return any(key in unit.keys for each in self.lists for unit in each.units)

    @property
    def has_places(self) -> bool:
        """Return whether its schedule says which device does what."""
        return len(self.lists) > 1

    def list_on(self, device: int) -> TaskList | None:
        """Return the tasks that a device may take from; None if the schedule has none for it."""
        if not self.has_places:
            return self.lists[0]
        return self.lists[device] if device < len(self.lists) else None

    def units_on(self, device: int) -> list[Unit]:
        """Return the units that a device has of a visit that it is running."""
        tasks = self.list_on(device)
        return [] if tasks is None else tasks.units

    def share_on(self, device: int) -> Share:
        """Return what a device needs for its part."""
        return self.shares[device if self.has_places else 0]

    def begins_window_on(self, device: int) -> bool:
        """Return whether the next task is the first of a window that other devices have begun."""
        if not self.has_places:
            return False
        left = self.lists[device].left
        return bool(left) and self._starts(left[0])

    def is_ahead_of(self, unit: Unit) -> bool:
        """Return whether another device has begun a later window than that of a unit."""
        return self.has_places and self._window_of(unit.tasks[-1]) < self._newest_window

    def _window_of(self, task: Action) -> int:
        return (task.microbatch or 0) // self.spec.graph.window

    def can_redo(self, task: Action) -> bool:
        """Return whether the boundary values of a task that was done are still there."""
        return (task.microbatch or 0) > (self.microbatch or 0) - self.most_open

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
        last = self.spec.graph.shards - 1
        for task in islice(left, 1, 3):
            before = unit[-1]
            fuses = task.kind is U and before.kind is B
            if self.spec.fused and before.kind is F and task.kind is B:
                fuses = task.shard == last and task.microbatch == before.microbatch
            if task.shard != before.shard or not fuses or not self._is_ready(task):
                break
            unit.append(task)
        alone = self.spec.fused and self.spec.stays and not self.spec.is_pipelined
        if alone and self.microbatch is not None:
            self._lengthen(unit, left)
        return self._unit(unit, next(islice(left, len(unit), None), None))

    def _is_ready(self, task: Action) -> bool:
        """Return whether no task of another list is left that comes before this one.

        A list has its own tasks in an order that `TaskGraph.needs` allows, as ``validate`` checks;
        so one that has all of them is never asked. Where tasks are done again, a new microbatch
        waits for those of the microbatch whose boundary values it replaces.
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
                (each.microbatch or 0) <= replaced for each in self._undone if each.kind is not U
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

    def take(self, unit: Unit) -> None:
        """Take the next unit off the tasks that are left."""
        tasks = self.lists[self._list_of[unit.tasks[0].shard]]
        for _ in unit.tasks:
            tasks.left.popleft()
        tasks.units.append(unit)
        self._newest_window = max(self._newest_window, self._window_of(unit.tasks[-1]))
        self._changed()

    def began(self, unit: Unit) -> None:
        """Note that a device has begun with a unit."""
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
            return window, self.spec.lists(window)[self._list_of[task.shard]].index(task)

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
        for each in self.lists:
            each.known = False

    def _unit(self, tasks: list[Action], following: Action | None) -> Unit:
        """Return a unit; ``following`` is the task after it, None at the end of a window."""
        shards = dict.fromkeys(task.shard for task in tasks)
        return Unit(
            tuple(tasks),
            tuple(state_key(self.spec.visit, shard) for shard in shards),
            starts_microbatch=self._starts(tasks[0]),
            ends_microbatch=not self._goes_on(tasks[-1], following),
        )

    def _starts(self, task: Action) -> bool:
        """Return whether a task is the first of its microbatch, or a pipelined window, there."""
        if not self.spec.is_pipelined:
            return task.kind is F and task.shard == 0
        first = self.shares[self._list_of[task.shard]].shards[0]
        window = self.spec.graph.window_of(task.microbatch or 0)
        return task.kind is F and task.shard == first and task.microbatch == window.start

    def _goes_on(self, task: Action, following: Action | None) -> bool:
        """Return whether a microbatch that stays on a device goes on after a task.

        Gradients of a tied parameter are summed where all microbatches of its window run, and an
        evaluation is summed where all of its batches do. A pipelined window stays as a whole.
        """
        graph = self.spec.graph
        if not graph.training:
            return following is not None or not self.is_in_last_window
        if following is None or not (graph.tied or self.spec.is_pipelined):
            return following is not None and following.microbatch == task.microbatch
        return following.microbatch in graph.window_of(task.microbatch or 0)


def placed(unit: Unit, device: int) -> list[Action]:
    """Return the unit's tasks on a device."""
    return [replace(task, device=device) for task in unit.tasks]
