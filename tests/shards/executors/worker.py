"""A worker in this process: real queues and real runs, over memory that is poisoned when left.

What may happen now happens in a random order. Runs of `shards/engine` are touched by `shard_run`,
`Staying` and `Moving` alone.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.agent.queued_run import RunBoundary
from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    DeviceJoined,
    DeviceLost,
    RunAdded,
    RunEnded,
    RunReleased,
    RunRestarted,
    ShardArrived,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.run_progress import RunSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.pick import Candidate
from cerebro_hydra.plan.schedules.validate import MemoryCheck
from cerebro_hydra.recipe import Recipe, Window
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import (
    ALIGNMENT,
    GradientLayout,
    aligned,
    memory_of,
    on_host,
)
from cerebro_hydra.shards.engine.microbatch import MemoryLimit
from cerebro_hydra.shards.engine.shard_run import ShardRun
from tests.shards.hopping import Trial

POISON = 0xFF  # as floats it is NaN


class Slot:
    """Holds one shard's segments and gradients in one piece of memory, and its cursor as JSON."""

    def __init__(self, trial: Trial, k: int, pool: BufferPool | None = None) -> None:
        layout = trial.layout.shards[k]
        sizes = [layout.frozen.nbytes, layout.trainable.nbytes, GradientLayout.of(layout).nbytes]
        starts = np.cumsum([0, *(n + -n % ALIGNMENT for n in sizes)])
        nbytes = int(starts[-1])
        self.memory = aligned(nbytes, zeroed=True) if pool is None else pool.lease(nbytes)
        frozen, trainable, self.gradients = (
            self.memory[start : start + n] for start, n in zip(starts[:-1], sizes, strict=True)
        )
        self.segments = {"frozen": frozen, "trainable": trainable}
        self.cursor = "null"

    @classmethod
    def received(cls, trial: Trial, k: int) -> Slot:
        """Return a slot with what a trial has of a shard."""
        slot = cls(trial, k)
        segments, cursor = trial.need(k)
        for name, content in segments.items():
            slot.segments[name][:] = content
        slot.cursor = json.dumps(cursor)
        return slot

    def take(self, other: Slot) -> Slot:
        """Copy another slot of the shard into this one."""
        self.memory[:], self.cursor = other.memory, other.cursor
        return self

    def load(self, run: ShardRun, k: int) -> None:
        """Let a run train a shard here."""
        cursor = json.loads(self.cursor)
        run.load(k, on_host(self.segments), cursor, memory_of(self.gradients))


def shard_run(
    trial: Trial,
    windows: Sequence[Window],
    recipe: Recipe | None = None,
    recompute: bool = True,
    shared: Collection[str] = (),
    most: Sequence[int] | None = None,
    moves: bool = False,
) -> ShardRun:
    """Return a run of a trial's next sub-epoch; tasks of each shard hold `most` bytes beside it."""
    return ShardRun(
        trial.runtime(recipe), recompute, trial.step, windows, shared=shared,
        limit=None if most is None else MemoryLimit(0, most), moves=moves,
    )  # fmt: skip


class Staying:
    """Trains, or evaluates, with each shard bound as long as it is on its device."""

    def __init__(self, make: Callable[[], ShardRun | ShardEvaluation]) -> None:
        self._make = make
        self.run: ShardRun | ShardEvaluation | None = None

    def begin(self) -> None:
        self.cancel()
        self.run = self._make()

    def cancel(self) -> None:
        if isinstance(self.run, ShardRun):
            self.run.cancel()
        elif self.run is not None:
            self.run.close()

    def load(self, k: int, slot: Slot) -> None:
        if isinstance(self.run, ShardRun):
            slot.load(self.run, k)
        else:
            self.run.load(k, on_host(slot.segments))

    def unload(self, k: int) -> None:
        self.run.unload(k)

    def compute(self, device: int, tasks: Sequence[Action], slot: Slot) -> None:
        for task in tasks:
            self.run.perform(task)
            if task.kind is ActionKind.U:
                slot.cursor = json.dumps(self.run.cursor(task.shard))

    def lose(self, device: int) -> None:
        """Nothing: what is lost with a device begins anew."""

    def close(self) -> dict[int, tuple[float, int]]:
        self.run.close()
        return getattr(self.run, "losses", {})


class Moving:
    """Trains microbatches that go from device to device.

    A shard is bound for one unit, or as long as it is on its device if activations are kept.
    """

    def __init__(self, make: Callable[[], ShardRun], spec: RunSpec) -> None:
        self._make, self.spec = make, spec
        self._runs: dict[int, ShardRun] = {}
        self._bound: dict[int, ShardRun] = {}
        self.boundary: RunBoundary
        self.left = 0  # the most bytes between two units
        self.places: dict[int, set[int]] = {}  # the devices of each microbatch

    def cancel(self) -> None:
        for run in self._runs.values():
            run.cancel()

    def begin(self) -> None:
        self.cancel()
        self._runs, self._losses = {}, {}
        self._bound.clear()
        slabs = [aligned(self.spec.boundary_bytes) for _ in range(self.spec.most_open)]
        for slab in slabs:
            slab.fill(POISON)
        self.boundary = RunBoundary(slabs, self.spec.graph)

    def load(self, k: int, slot: Slot) -> None: ...

    def unload(self, k: int) -> None:
        if k in self._bound:
            self._bound.pop(k).unload(k)

    def compute(self, device: int, tasks: Sequence[Action], slot: Slot) -> None:
        order, k = self.boundary.order(tasks), tasks[0].shard
        if device not in self._runs:
            self._runs[device] = self._make()
        run = self._runs[device]
        assert order.record is not None
        run.take_up(tasks, memory_of(order.slabs["boundary"]), order.record)
        if k not in self._bound:
            slot.load(run, k)
            self._bound[k] = run
        for task in tasks:
            run.perform(task)
            self.places.setdefault(task.microbatch or 0, set()).add(device)
        slot.cursor = json.dumps(run.cursor(k))
        if self.spec.recompute:
            self.unload(k)
        record = run.put_down()
        self.left = max(self.left, record.nbytes)
        self.boundary.note(tasks[-1], record)
        self._losses |= run.losses

    def lose(self, device: int) -> None:
        if (run := self._runs.pop(device, None)) is not None:
            run.cancel()
            self._bound = {k: other for k, other in self._bound.items() if other is not run}

    def close(self) -> dict[int, tuple[float, int]]:
        for run in self._runs.values():
            run.close()
        return self._losses


@dataclass
class Resident:
    """Holds a visit at the worker: its trial, what runs it, and where its shards are."""

    trial: Trial
    spec: RunSpec
    run: Staying | Moving
    home: dict[int, Slot] = field(default_factory=dict)
    disk: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    on: dict[int, tuple[int, Slot]] = field(default_factory=dict)  # with the device
    published: dict[int, tuple[dict[str, bytes], str]] = field(default_factory=dict)
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    age: int = 0  # how often it began anew

    def begin(self) -> None:
        for held in (self.home, self.disk, self.on, self.published):
            held.clear()
        self.run.begin()

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
        share: the budget of each device, as a share of the bytes of all runs.
        deaths: how many devices die; then all runs must move.
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
            {(s.run, k): shard.state for s in specs for k, shard in enumerate(s.shards)},
        )  # fmt: skip
        self._state = WorkerState([budget] * devices, host, self._wander)
        self._choice = random.Random(seed)
        self._pool = BufferPool()
        self._deaths, self._devices = deaths, devices
        self._lanes: dict[Hashable, deque[tuple[Callable[[], None], list[WorkerEvent]]]] = {}
        self.restarts = 0

    def run(self) -> None:
        """Run until every run has ended; none goes on after an error."""
        try:
            self._run()
        except BaseException:
            for resident in self.residents:
                resident.run.cancel()
            raise

    def _run(self) -> None:
        for resident in self.residents:
            resident.begin()
        events: list[WorkerEvent] = [RunAdded(resident.spec) for resident in self.residents]
        left, idle = len(self.residents), 0
        while left:
            following: list[WorkerEvent] = []
            ended: list[int] = []
            for _, group in groupby(self._state.handle(events), _unit_of):
                first, *others = group
                if isinstance(first, RunEnded):
                    assert first.outcome == "finished", first
                    ended.append(first.run)
                elif isinstance(first, RunRestarted):
                    self.restarts += 1
                    self._check.abandon(first.run)
                    self.residents[first.run].age += 1
                    self.residents[first.run].begin()
                else:
                    self._take([first, *others])
            for run in ended:
                left -= 1
                self._end(self.residents[run])
                following.append(RunReleased(run))
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
        resident.losses = resident.run.close()
        if resident.published:
            resident.trial.shards = [resident.published[k] for k in sorted(resident.published)]

    def _wander(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Pick any run, or leave them all to another device."""
        return self._choice.choice([*candidates, None, None])

    def _take(self, actions: list[Action]) -> None:
        action, resident = actions[0], self.residents[actions[0].trial]
        age = resident.age

        def work() -> None:
            for each in actions:
                self._check.begin(each)
            if resident.age == age:
                self._carry_out(resident, actions)
            for each in actions:
                self._check.end(each)

        if action.kind is ActionKind.DROP:
            work()
            return
        done: list[WorkerEvent] = [ActionDone(each, 1.0) for each in actions]
        if action.kind is ActionKind.RECV:
            done = [ShardArrived(action.trial, action.shard)]
        place = HOST if action.device is None else action.device
        lane = place, "compute" if action.kind.computes else str(action.kind)
        self._lanes.setdefault(lane, deque()).append((work, done))

    def _carry_out(self, resident: Resident, actions: list[Action]) -> None:
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
                pass  # it went when the run began anew
            case ActionKind.DROP if action.device == HOST:
                resident.home.pop(k).memory.fill(POISON)
            case ActionKind.LOAD:
                slot = Slot(resident.trial, k, self._pool).take(resident.home[k])
                resident.on[k] = action.device, slot
                resident.run.load(k, slot)
            case ActionKind.SPILL | ActionKind.DROP:
                resident.run.unload(k)
                _, slot = resident.on.pop(k)
                if action.kind is ActionKind.SPILL:
                    resident.home[k].take(slot)
                unchanged = np.array_equal(slot.memory, resident.home[k].memory)
                assert unchanged, f"{action} loses changes"
                self._free(slot)
            case ActionKind.SEND:
                slot = resident.at_home(k)
                content = {name: buffer.tobytes() for name, buffer in slot.segments.items()}
                resident.published[k] = content, slot.cursor
            case _:
                resident.run.compute(action.device, actions, resident.on[k][1])

    def _free(self, slot: Slot) -> None:
        """Poison a device's memory, and check that nothing of the run refers to it any more."""
        leased = self._pool.leased - slot.memory.nbytes
        slot.memory.fill(POISON)
        del slot.memory, slot.segments, slot.gradients
        assert self._pool.leased == leased

    def _kill(self, device: int) -> list[WorkerEvent]:
        """Let a device die with all that is in its memory."""
        for lane in [lane for lane in self._lanes if lane[0] == device]:
            self._lanes[lane].clear()
        self._check.lose(device)
        for resident in self.residents:
            resident.run.lose(device)
            for k in [k for k, (there, _) in resident.on.items() if there == device]:
                resident.on.pop(k)[1].memory.fill(POISON)
        return [DeviceLost(device), DeviceJoined(device)]


def _unit_of(answer: object) -> Hashable:
    if isinstance(answer, Action) and answer.kind.computes:
        return answer.trial, answer.shard, answer.device
    return object()
