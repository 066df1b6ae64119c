"""Devices in this process among which microbatches move: real queues and runs, over records."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from cerebro_hydra.agent.queued_run import RunBoundary
from cerebro_hydra.plan.messages.actions import Action, ActionKind
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
from cerebro_hydra.plan.queues.ledger import state_key
from cerebro_hydra.plan.queues.run_progress import RunSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.pick import Candidate
from cerebro_hydra.recipe import Recipe, Window
from cerebro_hydra.shards.admission.profile import TrialProfile, profile
from cerebro_hydra.shards.engine.layout import aligned, memory_of, on_host
from cerebro_hydra.shards.engine.microbatch import MemoryLimit
from cerebro_hydra.shards.engine.shard_run import ShardRun
from tests.shards.by_task.device_loop import POISON, Slot
from tests.shards.hopping import Trial


def described(trial: Trial, windows: Sequence[Window]) -> TrialProfile:
    """Return what the largest batch of a trial needs."""
    batch = max((b for window in windows for b in window), key=lambda b: b.rows)
    tasks = profile(trial.recipe, trial.cut_model, trial.layout, (batch.features, batch.labels))
    return TrialProfile.of(trial.recipe, trial.cut_model, trial.layout, tasks)


@dataclass
class Mover:
    """Holds a run whose microbatches move: its shards at home and on devices, and what it left."""

    trial: Trial
    make: Callable[[], Recipe]
    windows: Sequence[Window]
    spec: RunSpec
    home: dict[int, tuple[Slot, str]] = field(default_factory=dict)
    on: dict[int, Slot] = field(default_factory=dict)
    cursors: dict[int, str] = field(default_factory=dict)  # of the shards on devices
    runs: dict[int, ShardRun] = field(default_factory=dict)
    published: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    boundary: RunBoundary | None = None
    bound: set[int] = field(default_factory=set)  # the shards on devices that runs refer to
    age: int = 0  # how often it began anew
    places: dict[int, set[int]] = field(default_factory=dict)  # the devices of each microbatch

    def begin(self) -> None:
        for run in self.runs.values():
            run.cancel()
        self.runs, self.home, self.losses, self.published = {}, {}, {}, {}
        self.bound.clear()
        slabs = [aligned(self.spec.boundary_bytes) for _ in range(self.spec.most_open)]
        for slab in slabs:
            slab.fill(POISON)
        self.boundary = RunBoundary(slabs, self.spec.graph)

    def run_on(self, device: int) -> ShardRun:
        if device not in self.runs:
            shared = self.trial.cut_model.shared
            self.runs[device] = ShardRun(
                self.trial.runtime(self.make()), self.spec.recompute, self.trial.step,
                self.windows, shared=shared,
                limit=MemoryLimit(0, self.spec.task_bytes), moves=True,
            )  # fmt: skip
        return self.runs[device]

    def compute(self, device: int, tasks: Sequence[Action]) -> None:
        """Do a unit as a device does."""
        assert self.boundary is not None
        order, run, k = self.boundary.order(tasks), self.run_on(device), tasks[0].shard
        assert order.record is not None
        run.take_up(tasks, memory_of(order.slabs["boundary"]), order.record)
        slot, cursor = self.on[k], json.loads(self.cursors[k])
        if k not in self.bound:
            run.load(k, on_host(slot.segments), cursor, memory_of(slot.gradients))
            self.bound.add(k)
        for task in tasks:
            run.perform(task)
            self.places.setdefault(task.microbatch or 0, set()).add(device)
        if self.spec.recompute:
            self.unload(k, run)
        self.boundary.note(tasks[-1], run.put_down())
        self.losses |= run.losses

    def unload(self, k: int, run: ShardRun) -> None:
        """Let a run refer to a shard no more."""
        run.unload(k)
        self.cursors[k] = json.dumps(run.cursor(k))
        self.bound.remove(k)


class MovingLoop:
    """Carries out what the queues of a worker say, in a random order of what may happen now.

    Args:
        deaths: how many devices die.
    """

    def __init__(self, movers: Sequence[Mover], devices: int, seed: int, deaths: int = 0) -> None:
        self.movers = movers
        self._choice = random.Random(seed)
        self._deaths, self._devices = deaths, devices
        need = max(mover.spec.device_need for mover in movers)
        self._state = WorkerState([need] * devices, None, self._wander)
        self._lanes: dict[tuple[Any, str], deque[tuple[Callable[[], Any], list[WorkerEvent]]]] = {}
        self.restarts = 0

    def run(self) -> None:
        """Run until every run has ended."""
        for mover in self.movers:
            mover.begin()
        events: list[WorkerEvent] = [RunAdded(mover.spec) for mover in self.movers]
        left = len(self.movers)
        while left:
            following: list[WorkerEvent] = []
            for _, group in groupby(self._state.handle(events), _unit_of):
                answers = list(group)
                if isinstance(answers[0], RunEnded):
                    assert answers[0].outcome == "finished", answers[0]
                    following.append(RunReleased(answers[0].run))
                    left -= 1
                elif isinstance(answers[0], RunRestarted):
                    self.restarts += 1
                    self.movers[answers[0].run].age += 1
                    self.movers[answers[0].run].begin()
                else:
                    self._take(answers)
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
        for mover in self.movers:
            for run in mover.runs.values():
                run.close()
            mover.trial.shards = [mover.published[k] for k in sorted(mover.published)]

    def _wander(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Pick any run, or leave them all to another device."""
        return self._choice.choice([*candidates, None, None])

    def _take(self, actions: list[Action]) -> None:
        action, mover = actions[0], self.movers[actions[0].trial]
        age = mover.age

        def work() -> None:
            if mover.age == age:
                self._carry_out(mover, actions)

        if action.kind is ActionKind.DROP:
            if mover.age == age:
                self._drop(mover, action)
            return
        done: list[WorkerEvent] = [ActionDone(each, 1.0) for each in actions]
        if action.kind is ActionKind.RECV:
            done = [ShardArrived(action.trial, action.shard)]
        kind = "compute" if action.kind.computes else str(action.kind)
        self._lanes.setdefault((action.device, kind), deque()).append((work, done))

    def _carry_out(self, mover: Mover, actions: list[Action]) -> None:
        action, k = actions[0], actions[0].shard
        match action.kind:
            case ActionKind.RECV:
                segments, cursor = mover.trial.need(k)
                slot = Slot.of(mover.trial, k)
                for name, content in segments.items():
                    slot.segments[name][:] = content
                mover.home[k] = slot, json.dumps(cursor)
            case ActionKind.LOAD:
                mover.on[k] = Slot.of(mover.trial, k)
                mover.on[k].memory[:] = mover.home[k][0].memory
                mover.cursors[k] = mover.home[k][1]
            case ActionKind.SPILL:
                if k in mover.bound:
                    mover.unload(k, mover.runs[action.device or 0])
                mover.home[k][0].memory[:] = mover.on[k].memory
                mover.home[k] = mover.home[k][0], mover.cursors[k]
                mover.on.pop(k).memory.fill(POISON)
            case ActionKind.SEND:
                slot, cursor = mover.home[k]
                content = {name: buffer.tobytes() for name, buffer in slot.segments.items()}
                mover.published[k] = content, cursor
            case _:
                mover.compute(action.device or 0, actions)

    def _drop(self, mover: Mover, action: Action) -> None:
        if action.device is not None and action.device >= 0 and action.shard in mover.on:
            if action.shard in mover.bound:
                mover.unload(action.shard, mover.runs[action.device])
            mover.on.pop(action.shard).memory.fill(POISON)

    def _kill(self, device: int) -> list[WorkerEvent]:
        """Let a device die with all that is in its memory."""
        there = {block.key for block in self._state.ledger.on(device)}
        for lane in [lane for lane in self._lanes if lane[0] == device]:
            self._lanes[lane].clear()
        for number, mover in enumerate(self.movers):
            if (run := mover.runs.pop(device, None)) is not None:
                run.cancel()
            for k in [k for k in mover.on if state_key(number, k) in there]:
                mover.on.pop(k).memory.fill(POISON)
                mover.bound.discard(k)
        return [DeviceLost(device), DeviceJoined(device)]


def _unit_of(answer: object) -> Hashable:
    if isinstance(answer, Action) and answer.kind.computes:
        return answer.trial, answer.shard, answer.device
    return object()
