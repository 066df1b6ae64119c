"""A run is a sub-epoch or an evaluation at a worker, whose tasks are a chain of units."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.schedules.graph import TaskGraph

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
class RunSpec:
    """Describes a run.

    Args:
        run: the number that its actions carry as their trial. It is not the trial's own number,
            because a worker may evaluate a trial on two partitions at once.
        by_modules: a microbatch stays on one device, which also holds its boundary values, as it
            must where the model is cut by modules. Else any device may take its next unit, and
            the boundary values are in DRAM from unit to unit.
        recompute: a backward computes its forward again. Otherwise a microbatch stays on one
            device, with all shards and activations.
        fused: forward and backward of the last shard are one unit, with its activations kept.
        later_seconds: the work of the trial after this run, by which it is preferred.
    """

    run: int
    graph: TaskGraph
    shards: tuple[ShardSpec, ...]
    by_modules: bool = False
    recompute: bool = True
    fused: bool = True
    later_seconds: float = 0.0

    @property
    def stays(self) -> bool:
        """Return whether a microbatch stays on one device."""
        return self.by_modules or not self.recompute

    @property
    def keeps_all(self) -> bool:
        """Return whether all shards and activations stay on the device with a microbatch."""
        return not self.recompute and self.graph.training

    @property
    def state_bytes(self) -> int:
        """Return the bytes of all shards."""
        return sum(shard.state for shard in self.shards)

    @property
    def boundary_bytes(self) -> int:
        """Return the bytes of a microbatch's boundary values."""
        return sum(shard.boundary for shard in self.shards)

    @property
    def held_bytes(self) -> int:
        """Return the bytes beside the state that a microbatch keeps on its device throughout."""
        if self.keeps_all:
            return sum(shard.activations for shard in self.shards)
        return self.boundary_bytes if self.stays else 0

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of a device that nobody else can have during a microbatch."""
        return self.device_need if self.keeps_all else self.held_bytes

    @property
    def device_need(self) -> int:
        """Return the bytes that a device must have for a microbatch to pass through it."""
        if self.keeps_all:
            return self.state_bytes + self.held_bytes
        return self.held_bytes + max(shard.state + shard.activations for shard in self.shards)

    @property
    def task_bytes(self) -> tuple[int, ...]:
        """Return the bytes beside the shards that tasks of each shard may have on a device."""
        if self.keeps_all:
            return (self.held_bytes,) * len(self.shards)
        return tuple(self.held_bytes + shard.activations for shard in self.shards)

    def buffered_need(self, buffers: int) -> int:
        """Return the bytes of a device with room for so many shards, of which one computes."""
        if self.keeps_all:
            return self.device_need
        return self.held_bytes + max(
            buffers * shard.state + shard.activations for shard in self.shards
        )

    @property
    def host_boundary_bytes(self) -> int:
        """Return the bytes of DRAM for the boundary values of a microbatch that moves about."""
        return 0 if self.stays else self.boundary_bytes

    @property
    def host_need(self) -> int:
        """Return the bytes of DRAM without which a worker refuses the run."""
        return self.host_state_bytes + self.host_boundary_bytes

    @property
    def host_state_bytes(self) -> int:
        """Return the bytes of DRAM without which the run can't go on; it is a shard's home."""
        return self.state_bytes if self.keeps_all else max(shard.state for shard in self.shards)


@dataclass(frozen=True, slots=True)
class Unit:
    """Tasks of one run that a device runs one after the other.

    They are of one shard, unless all shards of the run stay on the device.
    """

    tasks: tuple[Action, ...]
    starts_microbatch: bool
    ends_microbatch: bool

    @property
    def run(self) -> int:
        """Return the number of the run."""
        return self.tasks[0].trial

    @property
    def shards(self) -> tuple[int, ...]:
        """Return its shards, in the order of their first tasks."""
        return tuple(dict.fromkeys(task.shard for task in self.tasks))

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Return the run with each of its shards."""
        return [(self.run, shard) for shard in self.shards]


Status = Literal["waiting", "open", "restarting", "cancelled", "finished", "released"]


class RunProgress:
    """Knows which tasks of a run are left and how long they will take.

    One unit of a run is under way at a time; the one after it may be reserved on the same device.
    """

    def __init__(self, spec: RunSpec, arrival: int) -> None:
        self.spec = spec
        self.arrival = arrival  # among the runs of the worker
        self.status: Status = "waiting"
        self._seconds = {
            (kind, number): shard.seconds(kind)
            for number, shard in enumerate(spec.shards)
            for kind in (F, B, U)
        }
        self.begin()

    def begin(self) -> None:
        """Begin at the first task."""
        self.units: list[Unit] = []  # under way and reserved
        self.boundary = 0  # bytes of DRAM that it has for boundary values
        self.microbatch: int | None = None  # the newest that has begun
        self.device: int | None = None  # where the microbatch stays
        self.waiting_since = 0  # the event at which its last unit ended
        self.absent = set(range(self.spec.graph.shards))
        self.sent: set[int] = set()
        self._windows = 0  # whose tasks were taken from the graph
        self._left: deque[Action] = deque()
        self._remaining: float | None = None

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
                + sum(self._seconds[task.kind, task.shard] for task in self._left)
                + microbatch * (graph.microbatches - begun)
                + update * (graph.windows - self._windows)
            )
        return self._remaining

    @property
    def done(self) -> bool:
        """Return whether every task is done."""
        return not self.units and not self._tasks()

    @property
    def is_in_last_window(self) -> bool:
        """Return whether no window is left after the one that tasks are taken from."""
        return self._windows == self.spec.graph.windows

    def next_unit(self) -> Unit | None:
        """Return the unit after those under way, or None after the last."""
        tasks = self._tasks()
        if not tasks:
            return None
        unit = [tasks[0]]
        last = self.spec.graph.shards - 1
        for task in islice(tasks, 1, 3):
            before = unit[-1]
            fuses = task.kind is U and before.kind is B
            if self.spec.fused and before.kind is F and task.kind is B:
                fuses = task.shard == last and task.microbatch == before.microbatch
            if task.shard != before.shard or not fuses:
                break
            unit.append(task)
        if self.spec.fused and self.spec.stays and self.microbatch is not None:
            self._lengthen(unit)
        return self._unit(unit, next(islice(tasks, len(unit), None), None))

    def _lengthen(self, unit: list[Action]) -> None:
        """Add the tasks that follow, while all of them take less than `UNIT_SECONDS`.

        Where it can, a unit ends with a microbatch, after which other runs may stay on the device.
        The shards of the last window are published one by one, so each has units of its own there,
        and so has each while one has no room in DRAM yet, which is made for the next task alone.
        """
        last = self.spec.graph.window_of(self.spec.graph.microbatches - 1)
        seconds = sum(self._seconds[task.kind, task.shard] for task in unit)
        end = 0
        while len(unit) < len(self._left) or self._take_window():
            task = self._left[len(unit)]
            if not self._goes_on(unit[-1], task):
                end = len(unit)
            seconds += self._seconds[task.kind, task.shard]
            whole = self.spec.keeps_all and not self.absent and task.microbatch not in last
            if seconds > UNIT_SECONDS or not (whole or task.shard == unit[0].shard):
                del unit[end or len(unit) :]
                return
            unit.append(task)

    def take(self, unit: Unit) -> None:
        """Take the next unit off the tasks that are left."""
        for _ in unit.tasks:
            self._left.popleft()
        self.units.append(unit)
        self._remaining = None

    def put_back(self, tasks: Iterable[Action]) -> None:
        """Put back tasks that have to be done again; all others that are left come after them."""
        graph, run = self.spec.graph, self.spec.run

        def order(task: Action) -> tuple[int, int]:
            window = (task.microbatch or 0) // graph.window
            return window, graph.tasks(run, window).index(task)

        self._left.extendleft(sorted(tasks, key=order, reverse=True))
        self._remaining = None

    def learn(self, task: Action, seconds: float) -> None:
        """Expect of the same kind of task what the last one took."""
        if self._seconds[task.kind, task.shard] != seconds:
            self._seconds[task.kind, task.shard] = seconds
            self._remaining = None

    def next_use(self, shard: int) -> float:
        """Return how many tasks come before the next one of the shard; infinity if none is left."""
        for distance, task in enumerate(self._tasks()):
            if task.shard == shard:
                return distance
        more = self._windows < self.spec.graph.windows
        return len(self._left) + shard if more else math.inf

    def _tasks(self) -> deque[Action]:
        while not self._left and self._take_window():
            pass
        return self._left

    def _take_window(self) -> bool:
        """Take the tasks of the next window from the graph; return whether there is one."""
        if self._windows == self.spec.graph.windows:
            return False
        self._left.extend(self.spec.graph.tasks(self.spec.run, self._windows))
        self._windows += 1
        self._remaining = None
        return True

    def _unit(self, tasks: list[Action], following: Action | None) -> Unit:
        """Return a unit; ``following`` is the task after it, None at the end of a window."""
        return Unit(
            tuple(tasks),
            starts_microbatch=tasks[0].kind is F and tasks[0].shard == 0,
            ends_microbatch=not self._goes_on(tasks[-1], following),
        )

    def _goes_on(self, task: Action, following: Action | None) -> bool:
        """Return whether a microbatch that stays on a device goes on after a task.

        Gradients of a tied parameter are summed where all microbatches of its window run, and an
        evaluation is summed where all of its batches do.
        """
        graph = self.spec.graph
        if not graph.training:
            return following is not None or not self.is_in_last_window
        if following is None or not graph.tied:
            return following is not None and following.microbatch == task.microbatch
        return following.microbatch in graph.window_of(task.microbatch or 0)


def placed(unit: Unit, device: int) -> list[Action]:
    """Return the unit's tasks on a device."""
    return [replace(task, device=device) for task in unit.tasks]
