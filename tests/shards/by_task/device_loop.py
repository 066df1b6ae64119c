"""The devices of a worker in this process: real queues and real shard runs over poisoned slots."""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    RunAdded,
    RunEnded,
    RunReleased,
    ShardArrived,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.run_progress import RunSpec, ShardSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.pick import Rule
from cerebro_hydra.plan.schedules.validate import MemoryCheck
from cerebro_hydra.shards.engine.evaluation import ShardEvaluation
from cerebro_hydra.shards.engine.layout import (
    ALIGNMENT,
    Bytes,
    GradientLayout,
    HostSegments,
    aligned,
    memory_of,
    on_host,
)
from cerebro_hydra.shards.engine.shard_run import ShardRun
from tests.shards.hopping import Trial

POISON = 0xFF  # as floats it is NaN


@dataclass
class Slot:
    """Holds one shard's segments and gradients in one piece of memory."""

    memory: Bytes
    segments: HostSegments
    gradients: Bytes

    @classmethod
    def of(cls, trial: Trial, k: int, pool: BufferPool | None = None) -> Slot:
        layout = trial.layout.shards[k]
        sizes = [layout.frozen.nbytes, layout.trainable.nbytes, GradientLayout.of(layout).nbytes]
        starts = np.cumsum([0, *(n + -n % ALIGNMENT for n in sizes)])
        nbytes = int(starts[-1])
        memory = aligned(nbytes, zeroed=True) if pool is None else pool.lease(nbytes)
        frozen, trainable, gradients = (
            memory[start : start + n] for start, n in zip(starts[:-1], sizes, strict=True)
        )
        return cls(memory, {"frozen": frozen, "trainable": trainable}, gradients)


@dataclass
class Resident:
    """Holds one run at the worker: its trial, and where its shards are."""

    trial: Trial
    run: ShardRun | ShardEvaluation
    spec: RunSpec
    home: dict[int, Slot] = field(default_factory=dict)
    disk: dict[int, bytes] = field(default_factory=dict)
    device: dict[int, Slot] = field(default_factory=dict)
    cursors: dict[int, str] = field(default_factory=dict)


def spec_of(
    run: int, trial: Trial, microbatches: int, recompute: bool, training: bool = True
) -> RunSpec:
    """Describe a run to the queues."""
    shards = []
    written = set(trial.cut_model.spec.written)
    for k, layout in enumerate(trial.layout.shards):
        names = {e.name.partition(":")[2] for e in layout.trainable.entries}
        writes = bool(names & written) or trial.cut_model.graphs is not None
        shards.append(ShardSpec(Slot.of(trial, k).memory.nbytes, 64, 64, forward_writes=writes))
    recipe = trial.recipe
    graph = TaskGraph(
        trial.cut_model.num_shards,
        microbatches,
        recipe.accumulate if training else 1,
        recipe.clip_grad_norm is not None and training,
        trial.cut_model.tied_groups if training else (),
        training,
    )
    by_modules = trial.cut_model.graphs is None
    return RunSpec(run, graph, tuple(shards), by_modules=by_modules, recompute=recompute)


class DeviceLoop:
    """Carries out what the queues of a worker say, in a random order of what may happen now.

    Args:
        share: the budget of each device, as a share of the bytes of all runs.
    """

    def __init__(self, residents: list[Resident], rule: Rule, seed: int, share: float, devices=1):
        self.residents = residents
        specs = [resident.spec for resident in residents]
        need = max(spec.device_need for spec in specs)
        budget = max(need, int(share * sum(spec.state_bytes for spec in specs)))
        host = max(spec.host_state_bytes + spec.host_boundary_bytes for spec in specs)
        host = max(2 * host, sum(spec.state_bytes for spec in specs) * 3 // 4)
        self.check = MemoryCheck(
            dict.fromkeys(range(devices), budget), host,
            {(s.run, k): shard.state for s in specs for k, shard in enumerate(s.shards)},
        )  # fmt: skip
        self._state = WorkerState([budget] * devices, host, rule)
        self._choice = random.Random(seed)
        self._pool = BufferPool()
        self._lanes: dict[tuple[int, str], deque[Action]] = {}
        self.tasks: list[Action] = []

    def run(self) -> None:
        """Run until every run has ended."""
        events: list[WorkerEvent] = [RunAdded(resident.spec) for resident in self.residents]
        left = {resident.spec.run for resident in self.residents}
        while left:
            following: list[WorkerEvent] = []
            ended: list[int] = []
            for answer in self._state.handle(events):
                if isinstance(answer, RunEnded):
                    assert answer.outcome == "finished", answer
                    ended.append(answer.run)
                elif isinstance(answer, Action) and answer.kind is ActionKind.DROP:
                    self.check.begin(answer)
                    self._drop(answer)
                    self.check.end(answer)
                else:
                    assert isinstance(answer, Action)
                    kind = "compute" if answer.kind.computes else str(answer.kind)
                    place = HOST if answer.device is None else answer.device
                    self._lanes.setdefault((place, kind), deque()).append(answer)
            for run in ended:
                left.remove(run)
                self.residents[run].run.close()
                following.append(RunReleased(run))
            self._state.validate()
            waiting = [lane for lane, actions in self._lanes.items() if actions]
            if waiting:
                action = self._lanes[self._choice.choice(waiting)].popleft()
                self.check.begin(action)
                self._carry_out(action)
                self.check.end(action)
                following.append(
                    ShardArrived(action.trial, action.shard)
                    if action.kind is ActionKind.RECV
                    else ActionDone(action, 1.0)
                )
            events = following
            assert events or not left, "the queues stand still"

    def _carry_out(self, action: Action) -> None:
        resident, k = self.residents[action.trial], action.shard
        match action.kind:
            case ActionKind.RECV:
                segments, cursor = resident.trial.need(k)
                slot = resident.home[k] = Slot.of(resident.trial, k)
                for name, content in segments.items():
                    slot.segments[name][:] = content
                resident.cursors[k] = json.dumps(cursor)
            case ActionKind.LOAD if action.device == HOST:
                resident.home[k] = self._from_disk(resident, k)
            case ActionKind.SPILL if action.device == HOST:
                resident.disk[k] = resident.home[k].memory.tobytes()
                resident.home.pop(k).memory.fill(POISON)
            case ActionKind.LOAD:
                slot = resident.device[k] = Slot.of(resident.trial, k, self._pool)
                slot.memory[:] = resident.home[k].memory
                if isinstance(resident.run, ShardRun):
                    cursor = json.loads(resident.cursors[k])
                    slots = on_host(slot.segments)
                    resident.run.load(k, slots, cursor, memory_of(slot.gradients))
                else:
                    resident.run.load(k, on_host(slot.segments))
            case ActionKind.SPILL:
                resident.run.unload(k)
                slot = resident.device.pop(k)
                resident.home[k].memory[:] = slot.memory
                self._free(slot)
            case ActionKind.SEND:
                slot = resident.home[k] if k in resident.home else self._from_disk(resident, k)
                resident.trial.publish(k, slot.segments, json.loads(resident.cursors[k]))
            case _:
                self.tasks.append(action)
                resident.run.perform(action)
                if action.kind is ActionKind.U and isinstance(resident.run, ShardRun):
                    resident.cursors[k] = json.dumps(resident.run.cursor(k))

    def _from_disk(self, resident: Resident, k: int) -> Slot:
        slot = Slot.of(resident.trial, k)
        slot.memory[:] = np.frombuffer(resident.disk[k], np.uint8)
        return slot

    def _drop(self, action: Action) -> None:
        resident, k = self.residents[action.trial], action.shard
        if action.device == HOST:
            resident.home.pop(k).memory.fill(POISON)
            return
        resident.run.unload(k)
        slot = resident.device.pop(k)
        assert np.array_equal(slot.memory, resident.home[k].memory), f"{action} loses changes"
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        """Poison a device's memory, and check that nothing of the run refers to it any more."""
        leased = self._pool.leased - slot.memory.nbytes
        slot.memory.fill(POISON)
        del slot.memory, slot.segments, slot.gradients
        assert self._pool.leased == leased
