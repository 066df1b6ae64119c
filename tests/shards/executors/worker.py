"""A worker in this process: real queues and real runs, over memory that is poisoned when left.

What may happen now happens in a random order. Runs of `shards/engine` are touched by `shard_run`,
`Staying` and `Moving` alone.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cerebro_hydra.agent.device.messages import Compute
from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.agent.visit import VisitBoundary
from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind, Part
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    DeviceJoined,
    DeviceLost,
    ShardArrived,
    VisitAdded,
    VisitEnded,
    VisitRestarted,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.pick import Ahead, Candidate
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.validate import MemoryCheck
from cerebro_hydra.recipe import Evaluation, Recipe, Window
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import (
    ALIGNMENT,
    Segments,
    aligned,
    memory_of,
    on_host,
)
from cerebro_hydra.shards.engine.microbatch import Execution, MemoryLimit, SubEpochInput
from cerebro_hydra.shards.engine.visit_run import VisitRun
from tests.shards.hopping import Trial

POISON = 0xFF  # as floats it is NaN


ALL = frozenset(Part)


class Slot:
    """Holds one shard's segments and gradients in one piece of memory, and its cursor as JSON.

    Attributes:
        parts: of the shard that are here; a device's slot has poison in the place of the others.
        lender: has the optimizer state that an update changes there, if it is not here.
    """

    lender: Slot | None = None

    def __init__(self, trial: Trial, k: int, pool: BufferPool | None = None) -> None:
        layout = trial.layout.shards[k]
        gradients = layout.gradients
        stale = trial.staleness[k] if trial.staleness else 0
        sizes = [layout.frozen.nbytes, layout.trainable.nbytes, gradients.nbytes]
        sizes.append(stale * gradients.nbytes)
        starts = np.cumsum([0, *(n + -n % ALIGNMENT for n in sizes)])
        nbytes = int(starts[-1])
        self.memory = aligned(nbytes, zeroed=True) if pool is None else pool.lease(nbytes)
        frozen, trainable, self.gradients, self.versions = (
            self.memory[start : start + n] for start, n in zip(starts[:-1], sizes, strict=True)
        )
        self.segments = {"frozen": frozen, "trainable": trainable}
        self.cursor = "null"
        self.parts = ALL
        self._marks, self._version = len(gradients.entries), gradients.nbytes
        self._trained = [
            (each.offset, each.nbytes)
            for each in layout.trainable.entries
            if each.name.startswith("param:")
        ]
        split = layout.split
        self._places = {
            Part.PARAMETERS: (frozen, trainable[:split], self.versions),
            Part.GRADIENTS: (self.gradients,),
            Part.OPTIMIZER: (trainable[split:],),
        }

    @classmethod
    def received(cls, trial: Trial, k: int) -> Slot:
        """Return a slot with what a trial has of a shard."""
        slot = cls(trial, k)
        segments, cursor = trial.need(k)
        for name, content in segments.items():
            slot.segments[name][:] = content
        slot.cursor = json.dumps(cursor)
        return slot

    def take(self, other: Slot, parts: Collection[Part] = ALL) -> Slot:
        """Copy parts of another slot of the shard into this one."""
        for part in parts:
            for mine, its in zip(self._places[part], other._places[part], strict=True):
                mine[:] = its
        self.cursor = other.cursor
        return self

    def begin(self, home: Slot, parts: Collection[Part]) -> Slot:
        """Have these parts of a shard alone, or beside those that are here."""
        if self.parts == ALL:
            self.memory.fill(POISON)
            self.parts = frozenset()
        self.parts |= frozenset(parts)
        return self.take(home, parts)

    def has_same(self, other: Slot, parts: Collection[Part]) -> bool:
        """Return whether parts of another slot are equal to those here."""
        pairs = (zip(self._places[part], other._places[part], strict=True) for part in parts)
        return all(np.array_equal(*pair) for pair in itertools.chain(*pairs))

    @property
    def has_gradients(self) -> bool:
        """Return whether a parameter has one."""
        return bool(self.gradients[: self._marks].any())

    def poison(self, places: Iterable[int]) -> None:
        """Overwrite the versions of weights in these places, which nobody may read any more."""
        for place in places:
            if place:
                self.versions[(place - 1) * self._version : place * self._version] = POISON
            else:
                for offset, nbytes in self._trained:
                    self.segments["trainable"][offset : offset + nbytes] = POISON

    def forget(self) -> None:
        """Let nobody find the memory here any more."""
        del self.memory, self.segments, self.gradients, self.versions, self._places

    @property
    def here(self) -> Segments:
        """Return the memory of what is here, as a visit takes it."""
        frozen, trainable, versions = self._places[Part.PARAMETERS]
        segments = {"frozen": frozen, "trainable": trainable}
        if versions.nbytes:
            segments["versions"] = versions
        owner = self if Part.OPTIMIZER in self.parts else self.lender
        if owner is not None:
            (segments["optimizer"],) = owner._places[Part.OPTIMIZER]
        return on_host(segments)

    def load(self, visit: VisitRun, k: int) -> None:
        """Let a visit train a shard here, with the parts that are here."""
        gradients = memory_of(self.gradients) if Part.GRADIENTS in self.parts else None
        visit.load(k, self.here, json.loads(self.cursor), gradients)

    def complete(self, visit: VisitRun, k: int) -> None:
        """Let a visit have the parts, too, that have come since."""
        gradients = memory_of(self.gradients) if Part.GRADIENTS in self.parts else None
        visit.complete(k, self.here, gradients)

    def perform(self, visit: VisitRun | ShardEvaluation, task: Action, lender: Slot | None) -> None:
        """Do a task of the shard, which has what an update changes at home for so long alone."""
        if task.kind is ActionKind.U and lender is not None:
            self.lender = lender
            self.complete(visit, task.shard)
        visit.perform(task)
        self.lender = None


Homes = Mapping[int, Slot]  # those whose optimizer state updates change where it is


def shard_run(
    trial: Trial,
    windows: Sequence[Window],
    recipe: Recipe | None = None,
    recompute: bool = True,
    shared: Collection[str] = (),
    most: Sequence[int] | None = None,
    moves: bool = False,
    crossings: Collection[int] | None = None,
) -> VisitRun:
    """Return a visit of a trial's next sub-epoch; tasks of a shard hold `most` bytes beside it."""
    limit = None if most is None else MemoryLimit(0, most)
    return VisitRun(
        trial.runtime(recipe),
        SubEpochInput(trial.step, windows, steps=len(windows)),
        Execution(recompute, moves=moves, crossings=crossings, shared=shared, limit=limit),
    )


class Staying:
    """Trains, or evaluates, with each shard bound as long as it is on its device."""

    def __init__(self, make: Callable[[], VisitRun | ShardEvaluation]) -> None:
        self._make = make
        self.visit: VisitRun | ShardEvaluation | None = None

    def begin(self) -> None:
        self.cancel()
        self.visit = self._make()

    def cancel(self) -> None:
        if isinstance(self.visit, VisitRun):
            self.visit.cancel()
        elif self.visit is not None:
            self.visit.close()

    def load(self, k: int, slot: Slot) -> None:
        if isinstance(self.visit, VisitRun):
            slot.load(self.visit, k)
        else:
            self.visit.load(k, slot.here)

    def complete(self, k: int, slot: Slot) -> None:
        slot.complete(self.visit, k)

    def unload(self, k: int) -> None:
        self.visit.unload(k)

    def order(self, tasks: Sequence[Action]) -> None:
        """Nothing: microbatches stay."""

    def compute(
        self, tasks: Sequence[Action], slots: Mapping[int, Slot], order: None, homes: Homes
    ) -> None:
        for task in tasks:
            slots[task.shard].perform(self.visit, task, homes.get(task.shard))
            if task.kind is ActionKind.U:
                slots[task.shard].cursor = json.dumps(self.visit.cursor(task.shard))

    def lose(self, device: int) -> None:
        """Nothing: what is lost with a device begins anew."""

    def close(self) -> dict[int, tuple[float, int]]:
        self.visit.close()
        return getattr(self.visit, "losses", {})

    @property
    def result(self) -> Evaluation | None:
        return self.visit.result


class Moving:
    """Trains, or evaluates, microbatches that go from device to device.

    A shard is bound for one unit, or as long as it is on its device if activations are kept.
    """

    def __init__(
        self, make: Callable[[], VisitRun | ShardEvaluation], spec: VisitSpec, start_step: int = 0
    ) -> None:
        self._make, self.spec, self.start_step = make, spec, start_step
        self.held: dict[int, int] = {}  # the most versions of each shard that tasks will read
        self._visits: dict[int, VisitRun | ShardEvaluation] = {}
        self._bound: dict[int, VisitRun | ShardEvaluation] = {}
        self.boundary: VisitBoundary
        self.left = 0  # the most bytes between two units
        self.places: dict[int, set[int]] = {}  # the devices of each microbatch
        self.ahead = 0  # units that were ordered before the one before them was done
        self.result: Evaluation | None = None  # devices may die after it

    def cancel(self) -> None:
        for visit in self._visits.values():
            visit.cancel() if isinstance(visit, VisitRun) else visit.close()

    def begin(self) -> None:
        self.cancel()
        self._visits, self._losses = {}, {}
        self._ended: dict[int, int] = {}  # microbatches whose backward is done, by shard
        self._bound.clear()
        slabs = [aligned(self.spec.boundary_bytes) for _ in range(self.spec.most_open)]
        for slab in slabs:
            slab.fill(POISON)
        self.boundary = VisitBoundary(slabs, self.spec.graph)

    def load(self, k: int, slot: Slot) -> None: ...

    def complete(self, k: int, slot: Slot) -> None:
        if k in self._bound:
            slot.complete(self._bound[k], k)

    def unload(self, k: int) -> None:
        if k in self._bound:
            self._bound.pop(k).unload(k)

    def order(self, tasks: Sequence[Action]) -> Compute:
        """Return the order of a unit, which its device may get before it has ended others."""
        order = self.boundary.order(tasks)
        begins = tasks[0].kind is ActionKind.F and tasks[0].shard == 0
        assert order.record is not None
        passes = any(task.kind is not ActionKind.U for task in tasks)
        self.ahead += passes and not (begins or order.record.tensors)
        return order

    def compute(
        self, tasks: Sequence[Action], slots: Mapping[int, Slot], order: Compute, homes: Homes
    ) -> None:
        device, k = tasks[0].device, tasks[0].shard
        assert device is not None
        slot = slots[k]
        if device not in self._visits:
            self._visits[device] = self._make()
        visit = self._visits[device]
        assert order.record is not None
        visit.take_up(tasks, memory_of(order.slabs["boundary"]), order.record)
        if k not in self._bound:
            slot.load(visit, k) if isinstance(visit, VisitRun) else visit.load(k, slot.here)
            self._bound[k] = visit
        for task in tasks:
            slot.perform(visit, task, homes.get(k))
            if task.kind is ActionKind.B:
                self._ended[k] = (task.microbatch or 0) + 1
            self.places.setdefault(task.microbatch or 0, set()).add(device)
        if isinstance(visit, VisitRun):
            slot.cursor = json.dumps(visit.cursor(k))
        if self.spec.graph.staleness and tasks[-1].kind is ActionKind.U:
            self._poison(slot, k, visit.cursor(k)["step"] - self.start_step)
        if self.spec.recompute:
            self.unload(k)
        record = visit.put_down()
        self.left = max(self.left, record.nbytes)
        self.boundary.note(tasks[-1], record)
        self._losses |= getattr(visit, "losses", {})

    def _poison(self, slot: Slot, k: int, newest: int) -> None:
        """Overwrite the versions of a shard that no task will read, now that it was updated."""
        graph = self.spec.graph
        number = graph.staleness[k] + 1
        ended = self._ended.get(k, 0)
        first = newest if ended == graph.microbatches else graph.version(k, ended)
        used = {version % number for version in range(first, newest + 1)}
        self.held[k] = max(self.held.get(k, 0), len(used))
        slot.poison({*range(number)} - ({0} if newest == graph.windows else used))

    def lose(self, device: int) -> None:
        self.boundary.lose(device)
        if (visit := self._visits.pop(device, None)) is not None:
            visit.cancel() if isinstance(visit, VisitRun) else visit.close()
            self._bound = {k: other for k, other in self._bound.items() if other is not visit}

    def close(self) -> dict[int, tuple[float, int]]:
        found = [r for v in self._visits.values() if (r := getattr(v, "result", None)) is not None]
        (self.result,) = found or [None]  # what the device with the last shard has summed
        for visit in self._visits.values():
            visit.close()
        return self._losses


@dataclass
class Resident:
    """Holds a visit at the worker: its trial, what runs it, and where its shards are."""

    trial: Trial
    spec: VisitSpec
    visit: Staying | Moving
    home: dict[int, Slot] = field(default_factory=dict)
    disk: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    on: dict[int, tuple[int, Slot]] = field(default_factory=dict)  # with the device
    published: dict[int, tuple[dict[str, bytes], str]] = field(default_factory=dict)
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    age: int = 0  # how often it began anew

    def begin(self) -> None:
        for held in (self.home, self.disk, self.on, self.published):
            held.clear()
        self.visit.begin()

    def at_home(self, k: int) -> Slot:
        if k in self.home:
            return self.home[k]
        slot = Slot(self.trial, k)
        content, slot.cursor = self.disk[k]
        slot.memory[:] = np.frombuffer(content, np.uint8)
        return slot

    @property
    def loss_sum(self) -> float:
        return sum(loss * rows for _, (loss, rows) in sorted(self.losses.items()))


class Worker:
    """Carries out what the queues of a worker say.

    Args:
        share: the budget of each device, as a share of the bytes of all visits.
        deaths: how many devices die; then all visits must move.
    """

    def __init__(
        self, residents: Sequence[Resident], seed: int, share: float, devices: int, deaths: int = 0
    ) -> None:
        self.residents = residents
        specs = [resident.spec for resident in residents]
        states = sum(spec.state_bytes for spec in specs)
        budget = max(int(share * states), *(spec.device_need for spec in specs))
        host = max(spec.host_state_bytes + spec.host_boundary_bytes for spec in specs)
        host = max(2 * host, states * 3 // 4 + sum(spec.host_boundary_bytes for spec in specs))
        self._check = MemoryCheck(
            dict.fromkeys(range(devices), budget), host,
            {(s.visit, k): shard.state for s in specs for k, shard in enumerate(s.shards)},
            apart={(s.visit, k): shard.apart for s in specs for k, shard in enumerate(s.shards)},
            at_home={each.visit for each in specs if each.updates_at_home},
        )  # fmt: skip
        self._state = WorkerState([budget] * devices, host, self._wander)
        self._choice = random.Random(seed)
        self._pool = BufferPool()
        self._deaths, self._devices = deaths, devices
        self._lanes: dict[Hashable, deque[tuple[Callable[[], None], list[WorkerEvent]]]] = {}
        self.restarts = 0

    def run(self) -> None:
        """Run until every visit has ended; none goes on after an error."""
        try:
            self._run()
        except BaseException:
            for resident in self.residents:
                resident.visit.cancel()
            raise

    def _run(self) -> None:
        for resident in self.residents:
            resident.begin()
        events: list[WorkerEvent] = [VisitAdded(resident.spec) for resident in self.residents]
        left, idle = len(self.residents), 0
        while left:
            following: list[WorkerEvent] = []
            ended: list[int] = []
            for answer in self._state.handle(events):
                first, *others = answer if isinstance(answer, tuple) else (answer,)
                if isinstance(first, VisitEnded):
                    assert first.outcome == "finished", first
                    ended.append(first.visit)
                elif isinstance(first, VisitRestarted):
                    self.restarts += 1
                    self._check.abandon(first.visit)
                    self.residents[first.visit].age += 1
                    self.residents[first.visit].begin()
                else:
                    self._take([first, *others])
            for visit in ended:
                left -= 1
                self._end(self.residents[visit])
            self._state.validate()
            waiting = [lane for lane in self._lanes.values() if lane]
            if self._deaths and self._choice.random() < 0.05:
                self._deaths -= 1
                following += self._kill(self._choice.randrange(self._devices))
            elif waiting:
                work, done = self._choice.choice(waiting).popleft()
                work()
                following += done
            events = following
            idle = 0 if events else idle + 1
            assert idle < 1000 or not left, "the queues stand still"

    def _end(self, resident: Resident) -> None:
        resident.losses = resident.visit.close()
        if resident.published:
            resident.trial.shards = [resident.published[k] for k in sorted(resident.published)]

    def _wander(self, candidates: Sequence[Candidate], ahead: Ahead) -> Candidate | None:
        """Pick any visit, or leave them all to another device."""
        return self._choice.choice([*candidates, None, None])

    def _take(self, actions: list[Action]) -> None:
        action, resident = actions[0], self.residents[actions[0].trial]
        age = resident.age
        order = resident.visit.order(actions) if action.kind.computes else None
        if action.kind is ActionKind.RECV:
            self._check.begin_anew(action.trial)

        def work() -> None:
            for each in actions:
                self._check.begin(each)
            if resident.age == age:
                self._carry_out(resident, actions, order)
            for each in actions:
                self._check.end(each)

        if action.kind is ActionKind.DROP:
            work()
            return
        seconds = self._choice.choice([1.0, 0.001])  # so many units are given ahead, or one is
        done: list[WorkerEvent] = [ActionDone(each, seconds) for each in actions]
        if action.kind is ActionKind.RECV:
            done = [ShardArrived(action.trial, action.shard)]
        place = HOST if action.device is None else action.device
        lane = place, "compute" if action.kind.computes else str(action.kind)
        self._lanes.setdefault(lane, deque()).append((work, done))

    def _carry_out(self, resident: Resident, actions: list[Action], order: Compute | None) -> None:
        action, k = actions[0], actions[0].shard
        match action.kind:
            case ActionKind.RECV:
                resident.home[k] = Slot.received(resident.trial, k)
            case ActionKind.LOAD if action.device == HOST:
                resident.home[k] = resident.at_home(k)
            case ActionKind.SPILL if action.device == HOST:
                slot = resident.home.pop(k)
                resident.disk[k] = slot.memory.tobytes(), slot.cursor
                slot.memory.fill(POISON)
            case ActionKind.DROP if resident.age and k not in resident.on | resident.home:
                pass  # it went when the visit began anew
            case ActionKind.DROP if action.device == HOST:
                resident.home.pop(k).memory.fill(POISON)
            case ActionKind.LOAD if k in resident.on:  # more of it
                _, slot = resident.on[k]
                resident.visit.complete(k, slot.begin(resident.home[k], action.parts))
            case ActionKind.LOAD:
                slot = Slot(resident.trial, k, self._pool)
                slot.begin(resident.home[k], action.parts or ALL)
                resident.on[k] = action.device, slot
                resident.visit.load(k, slot)
            case ActionKind.SPILL | ActionKind.DROP:
                resident.visit.unload(k)
                _, slot = resident.on.pop(k)
                if action.kind is ActionKind.SPILL:
                    self._write(slot, resident.home[k], action)
                assert slot.has_same(resident.home[k], slot.parts), f"{action} loses changes"
                self._free(slot)
            case ActionKind.SEND:
                slot = resident.at_home(k)
                content = {name: buffer.tobytes() for name, buffer in slot.segments.items()}
                resident.published[k] = content, slot.cursor
            case _:
                slots = {k: slot for k, (_, slot) in resident.on.items()}
                homes = resident.home if resident.spec.updates_at_home else {}
                resident.visit.compute(actions, slots, order, homes)

    def _write(self, slot: Slot, home: Slot, action: Action) -> None:
        """Write the parts that an action names; gradients are gone if an update has used them."""
        used = set() if slot.has_gradients else {Part.GRADIENTS}
        home.take(slot, slot.parts & {*(action.parts or ALL), *used})

    def _free(self, slot: Slot) -> None:
        """Poison a device's memory, and check that nothing of the visit refers to it any more."""
        leased = self._pool.leased - slot.memory.nbytes
        slot.memory.fill(POISON)
        slot.forget()
        assert self._pool.leased == leased

    def _kill(self, device: int) -> list[WorkerEvent]:
        """Let a device die with all that is in its memory."""
        for lane in [lane for lane in self._lanes if lane[0] == device]:
            self._lanes[lane].clear()
        self._check.lose(device)
        for resident in self.residents:
            resident.visit.lose(device)
            for k in [k for k, (there, _) in resident.on.items() if there == device]:
                resident.on.pop(k)[1].memory.fill(POISON)
        return [DeviceLost(device), DeviceJoined(device)]
