"""A worker's queues with real devices, memory and disk; no coordinator and no network.

A trial that only takes time lets a real worker with many of them fit few cores.

Queues, processes, messages, slots and slabs are real; what takes time is a wait until a moment, so
that a core that is busy with something else delays it little.
"""

from __future__ import annotations

import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cerebro_hydra.agent.attempts import Outbox, VisitPlanner
from cerebro_hydra.agent.audits import Audits
from cerebro_hydra.agent.device.device import VisitOpener
from cerebro_hydra.agent.device.messages import Losses, VisitOrder
from cerebro_hydra.agent.device.process import OwnDevice
from cerebro_hydra.agent.device.runtime import Lane
from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.agent.device.task_watch import Task, TimeLimits
from cerebro_hydra.agent.device.worker_devices import OnAnswer, OnGone, WorkerDevice
from cerebro_hydra.agent.memory.fetch import FetchManager
from cerebro_hydra.agent.memory.pool import BufferPool, Slabs
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.agent.memory.shard_store import Shard, ShardStore
from cerebro_hydra.agent.queue_trainer import QueueTrainer
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.messages.instructions import Evaluate, StartSubEpoch, StateSource
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.trial_plan import TrialPlan
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.differences import TensorDigests
from cerebro_hydra.shards.engine.layout import Bytes, HostSegments, Segments, ShardBytes
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_document import TrialSpec

ME = "me"
EPOCH, PARTITION, WORKER = 0, 0, 0

StartDevice = Callable[[Slabs, OnAnswer, OnGone], WorkerDevice]


def train(attempt: int, trial: int, state: int, uncut: bool = False) -> StartSubEpoch:
    """Ask for the sub-epoch that makes `state` of the one before."""
    source = StateSource(state - 1, ME)
    return StartSubEpoch(attempt, trial, state, EPOCH, (PARTITION,), WORKER, ME, source, {}, uncut)


def evaluate(attempt: int, trial: int, state: int) -> Evaluate:
    """Ask for the evaluation of a state."""
    return Evaluate(attempt, trial, EPOCH, state, (PARTITION,), WORKER, ME, StateSource(state, ME))


def in_this_process(
    opener: VisitOpener,
    in_place: bool = False,
    double_buffering: bool = True,
    end_process: Callable[[], object] = sys.exit,
    begin: Callable[[int], object] = lambda attempt: None,
    lane: Lane | None = None,
) -> StartDevice:
    """Return what starts a device in this process.

    Args:
        opener: opens its visits.
        in_place: whether it computes in the worker's memory.
        double_buffering: whether a shard is brought while another one computes.
        end_process: ends the process, because code of a trial hangs.
        begin: is told of the attempt whose code runs.
        lane: on which it computes; None means on a thread of its own.
    """

    def start(slabs: Slabs, on_answer: OnAnswer, on_gone: OnGone) -> OwnDevice:
        computing = lane or Lane("device-computes")
        if lane is None:
            computing.start(end_process)
        memory, buffers = DeviceMemory(in_place=in_place), double_buffering and not in_place
        return OwnDevice(opener, computing, memory, buffers, end_process, begin, on_answer, on_gone)

    return start


class QueueWorker:
    """Trains in the queues of one worker.

    Args:
        start: starts one device of the worker, which may map these slabs.
        state: the queues.
        smallest: the bytes of the smallest device; None if that has no limit.
        rows: of the partition, training and validation alike.
        spec_of: describes a trial by its number, as ``TrialSpec`` does.
        resident: whether the one device computes in this memory itself.
        poison: overwrite memory that is given back.
        memory: the bytes of DRAM for states, beyond which they are spilled.
        batch_seconds: after which a batch is ended.
        audit_share: how much of the time audits may take.
        lane: on which the one device computes, if that is the thread that waits for results.
        pool: gives the memory, if no other process has to see it.
        folder: holds states that are at no agent.
        connect: connects to the agents from which states are fetched.
        on_whole: is told of a state that was fetched, by its trial and number.
        name: of the agent.
    """

    def __init__(
        self,
        start: StartDevice,
        state: WorkerState,
        smallest: int | None,
        rows: int,
        spec_of: Callable[[int], Any],
        *,
        resident: bool = False,
        poison: bool = False,
        memory: int = 4 << 30,
        batch_seconds: float | None = None,
        audit_share: float = 0.0,
        lane: Lane | None = None,
        pool: BufferPool | None = None,
        folder: Any = None,
        connect: Any = None,
        on_whole: Callable[[int, int], None] = lambda trial, state: None,
        name: str = ME,
    ) -> None:
        self.slabs = Slabs()
        self._scratch = tempfile.TemporaryDirectory(prefix="cerebro-hydra-")
        self._spec_of = spec_of
        self._lane = lane
        pool = pool or BufferPool(poison=poison, allocate=self.slabs.allocate)
        self.store = ShardStore(SegmentStore(memory, self._scratch.name, pool, state))
        self.reported: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.worked: list[events.DevicesWorked] = []
        self.state = state
        residents = 1 if resident else 2
        resources = WorkerResources(len(state.queues), smallest, residents=residents)
        self.planner = VisitPlanner(lambda split, partition: rows, resources)
        self.audits = Audits(audit_share)
        self.fetches = FetchManager(name, self.store, folder, connect, on_whole)
        self.trainer = QueueTrainer(
            [partial(start, self.slabs)] * len(state.queues),
            self.planner,
            self.store,
            self.fetches,
            Outbox(name, self._report, lambda record: None, lambda attempt: None, self._report),
            self.audits,
            TimeLimits(batch_seconds, None, print),
        )
        self.store.on_change = self.trainer.look_again
        self.trainer.start()

    def perform(self, task: Task, uri: str | None = None) -> None:
        """Give the worker a task, as a coordinator would; ``uri`` is where its state is."""
        self.trainer.learn(self._spec_of(task.trial))
        self.trainer.perform(task, uri)

    def put(self, trial: int, state: int, shards: Sequence[HostSegments], step: int = 0) -> None:
        """Publish a state here, as a fetch would."""
        announced = self.store.expect(trial, state, len(shards))
        for number, segments in enumerate(shards):
            named = {}
            for name, content in segments.items():
                buffer = self.store.segments.allocate(content.nbytes)
                buffer[:] = content
                named[name] = (digest(buffer), buffer)
            self.store.put(announced, number, Shard(named, {"step": step} if step else {}))

    def get(self, trial: int, state: int, shards: int) -> list[HostSegments]:
        """Return copies of a state that was published."""
        found = [self.store.wait(trial, state, k, lambda: True).segments for k in range(shards)]
        return [{name: b.copy() for name, (_, b) in each.items()} for each in found]

    def report(self, seconds: float | None = None) -> Any:
        """Return the next thing that the worker reports.

        Raises:
            queue.Empty: nothing was reported in so many seconds, or before the device ended.
        """
        while self._lane is not None and self.reported.empty():
            if not self._lane.step():
                raise queue.Empty
        report = self.reported.get(timeout=seconds)
        if isinstance(report, Exception):
            raise report
        return report

    def train_all(self, trials: Sequence[int]) -> float:
        """Train a sub-epoch of each trial, beginning with state 0; return the seconds it took.

        Raises:
            RuntimeError: one was not trained.
        """
        begun = time.monotonic()
        for trial in trials:
            self.perform(train(trial, trial, 1))
        for _ in trials:
            result = self.result()
            if not isinstance(result, events.SubEpochDone):
                raise RuntimeError(f"a trial was not trained: {result}")
        return time.monotonic() - begun

    def result(self, seconds: float | None = None) -> Any:
        """Return the next end that the worker reports.

        Raises:
            queue.Empty: nothing was reported in so many seconds, or before the device ended.
        """
        while True:
            report = self.report(seconds)
            if isinstance(report, events.DevicesWorked):
                self.worked.append(report)
            elif not isinstance(report, events.SubEpochEnding):
                return report

    def settle(self) -> None:
        """Wait until the worker has decided on all that it was told by now."""
        done = threading.Event()
        self.trainer._inbox.put(done.set)
        done.wait()

    def close(self) -> None:
        """End the devices and fetches."""
        self.trainer.close()
        self.fetches.close()
        self._scratch.cleanup()

    def _report(self, report: Any) -> None:
        self.reported.put(report)
        if self._lane is not None:
            self._lane.put(lambda: None)  # whoever waits there looks for reports again


@dataclass(frozen=True)
class DelaySpec:
    """Says of a trial what the queues of a worker ask, as ``TrialSpec`` does."""

    trial: int
    shards: tuple[None, ...]
    batch_size: int
    accumulate: int = 1
    recompute: bool | None = True
    schedule: str = "sequential"
    staleness: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    tasks: None = None
    plan: TrialPlan | None = None


@dataclass(frozen=True)
class DelayTrials:
    """Opens visits whose forwards and backwards are waits.

    It also is what makes the opener of a device's process.

    Args:
        shards: how many each trial has.
        nbytes: of the state of a shard, by the number of the trial.
        forward: seconds of a forward, likewise.
        backward: seconds of a backward for each of a forward; updates take none.
        rows: of each microbatch.
    """

    shards: int
    nbytes: Mapping[int, int]
    forward: Mapping[int, float]
    backward: float = 2.0
    rows: int = 4

    def __call__(self) -> DelayTrials:
        """Return itself, in the process of a device."""
        return self

    def forget(self, trial: int) -> None:
        """Keep nothing of a trial."""

    def profile(self, trial: TrialSpec) -> TrialProfile:
        """Describe a trial."""
        each = ShardBytes(0, self.nbytes[trial.trial], 0, False)
        return TrialProfile((each,) * self.shards, (), False)

    def open(self, order: VisitOrder) -> DelayRun:
        """Return a visit of a trial."""
        forward = self.forward[order.task.trial]
        seconds = {ActionKind.F: forward, ActionKind.B: self.backward * forward}
        return DelayRun(order, lambda task: seconds.get(task.kind, 0.0), self.rows)

    def initial(self, trial: int) -> list[HostSegments]:
        """Return the first state of a trial."""
        nbytes = self.nbytes[trial]
        return [
            {"frozen": np.zeros(0, np.uint8), "trainable": np.zeros(nbytes, np.uint8)}
            for _ in range(self.shards)
        ]


class DelayRun:
    """Waits for each task, and writes to the shard's slot in its update.

    Args:
        seconds: how long a task takes.
        rows: of each microbatch.
    """

    def __init__(self, order: VisitOrder, seconds: Callable[[Action], float], rows: int) -> None:
        training = isinstance(order.task, StartSubEpoch)
        self.stays = training and not order.recompute
        self.resident = order.resident
        self._seconds, self._rows = seconds, rows
        self._slots: dict[int, Segments] = {}
        self._steps: dict[int, int] = {}

    def moved(self, slots: Segments) -> Segments:
        """Return the slots."""
        return slots

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Take a shard."""
        self._slots[shard] = slots
        self._steps[shard] = (cursor or {}).get("step", 0)

    def complete(self, shard: int, slots: Segments) -> None:
        """Take more of a shard."""
        self._slots[shard] = slots

    def unload(self, shard: int) -> tuple[Mapping[str, Any], bool]:
        """Let go of a shard."""
        del self._slots[shard]
        return {"step": self._steps[shard]}, False

    def perform(
        self, task: Action, then: Callable[[Action], Action] | None = None
    ) -> tuple[Action, Losses]:
        """Wait as long as the task takes."""
        _wait_until(time.perf_counter() + self._seconds(task))
        if task.kind is ActionKind.U:
            self._slots[task.shard]["trainable"][0] += 1
            self._steps[task.shard] += 1
        if task.kind is not ActionKind.B or task.shard or task.microbatch is None:
            return task, {}
        return task, {task.microbatch: (0.0, self._rows)}

    def cursor(self, shard: int) -> Mapping[str, Any]:
        """Return the cursor of a shard."""
        return {"step": self._steps[shard]}

    def digests(self, shard: int) -> TensorDigests:
        """Return nothing: these trials are not audited."""
        return {}

    def close(self) -> Evaluation:
        """End the visit."""
        return Evaluation({"loss": (0.0, 1)}, {})

    def cancel(self) -> None:
        """End the visit where it stands."""


class DelayMemory(DeviceMemory):
    """Copies shards at a given speed, each way.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    def promote(self, slabs: Mapping[str, Bytes], gradients: int) -> Segments:
        """Return slots with the content of slabs."""
        ends = self._ends(slabs)
        slots = super().promote(slabs, gradients)
        _wait_until(ends)
        return slots

    def demote(self, slots: Segments, slabs: Mapping[str, Bytes]) -> None:
        """Copy slots into slabs."""
        ends = self._ends(slabs)
        super().demote(slots, slabs)
        _wait_until(ends)

    def _ends(self, slabs: Mapping[str, Bytes]) -> float:
        nbytes = sum(slab.nbytes for slab in slabs.values())
        return time.perf_counter() + nbytes / self._rate


def _wait_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)
