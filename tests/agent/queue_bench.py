"""Drives the queues of a worker with real devices, without a coordinator or a network."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from cerebro_hydra.agent.buffer_pool import BufferPool
from cerebro_hydra.agent.device_process import DeviceProcess, DeviceSettings
from cerebro_hydra.agent.fetch_manager import FetchManager
from cerebro_hydra.agent.queue_trainer import QueueTrainer
from cerebro_hydra.agent.run_planner import RunPlanner
from cerebro_hydra.agent.segment_store import SegmentStore
from cerebro_hydra.agent.shard_store import Shard, ShardStore
from cerebro_hydra.agent.slabs import Slabs
from cerebro_hydra.agent.task_watch import Task, TaskWatch
from cerebro_hydra.plan import events
from cerebro_hydra.plan.actions import Action, ActionKind
from cerebro_hydra.plan.instructions import Evaluate, StartSubEpoch, StateSource
from cerebro_hydra.plan.memory_check import MemoryCheck
from cerebro_hydra.plan.run_progress import RunSpec
from cerebro_hydra.plan.schedules.sharp import sharp
from cerebro_hydra.plan.worker_events import (
    ActionDone,
    Answer,
    DeviceLost,
    RunAdded,
    RunCancelled,
    RunReleased,
    RunRestarted,
    ShardArrived,
    WorkerEvent,
)
from cerebro_hydra.plan.worker_state import WorkerState
from cerebro_hydra.shards.layout import Segments
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.testing.local_launcher import fork_server
from tests.agent.standins import SECONDS

ME = "me"
EPOCH, PARTITION, WORKER = 0, 0, 0


def train(attempt: int, trial: int, visit: int) -> StartSubEpoch:
    """Ask for the sub-epoch that makes state `visit` of the one before."""
    return StartSubEpoch(
        attempt, trial, visit, EPOCH, PARTITION, WORKER, ME, StateSource(visit - 1, ME), {}
    )


def evaluate(attempt: int, trial: int, visit: int) -> Evaluate:
    return Evaluate(attempt, trial, EPOCH, visit, PARTITION, WORKER, ME, StateSource(visit, ME))


class CheckedState(WorkerState):
    """The queues, with every action checked by where shards were when it began and ended."""

    def __init__(self, budgets: Sequence[int | None], host: int | None, **options: Any) -> None:
        super().__init__(budgets, host, sharp, **options)
        self._bytes: dict[tuple[int, int], int] = {}
        self._work: dict[tuple[int, int], int] = {}
        self.check = MemoryCheck(dict(enumerate(budgets)), host, self._bytes, self._work)
        self.added: list[RunSpec] = []
        self.computed = threading.Event()  # a task of any run

    def handle(self, events: Iterable[WorkerEvent]) -> list[Answer]:
        for event in events:
            match event:
                case RunAdded():
                    self.added.append(event.spec)
                    for number, shard in enumerate(event.spec.shards):
                        self._bytes[event.spec.run, number] = shard.state
                        self._work[event.spec.run, number] = shard.activations
                case RunCancelled() | RunReleased():
                    self.check.abandon(event.run)
                case DeviceLost():
                    self.check.lose(event.device)
                case ShardArrived():
                    self.check.end(Action(event.run, event.shard, ActionKind.RECV))
                case ActionDone():
                    self.check.end(event.action)
                    if event.action.kind.computes:
                        self.computed.set()
        answers = super().handle(events)
        for answer in answers:
            if isinstance(answer, RunRestarted):
                self.check.abandon(answer.run)
            elif isinstance(answer, Action):
                self.check.begin(answer)
                if answer.kind is ActionKind.DROP:
                    self.check.end(answer)
        self.validate()
        return answers


class QueueBench:
    """One worker with devices in processes of their own.

    Every action that the queues gave is checked against the places and bytes of shards as they were
    when it was given and answered.
    """

    def __init__(
        self,
        opener: Any,
        num_shards: int,
        budgets: Sequence[int | None] = (None,),
        host_budget: int | None = None,
        *,
        rows: int = 40,
        batch_size: int = 4,
        window: int = 1,
        recompute: bool | None = None,
        double_buffering: bool = True,
        context: Any = None,
        batch_seconds: float | None = None,
    ) -> None:
        self.slabs = Slabs()
        self._scratch = tempfile.TemporaryDirectory()
        pool = BufferPool(poison=True, allocate=self.slabs.allocate)
        self.store = ShardStore(SegmentStore(1 << 30, self._scratch.name, pool))
        self.reported: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.devices: list[DeviceProcess] = []  # the present process of each device comes last
        connect: Any = None
        folder: Any = None
        fetch_manager = FetchManager(ME, self.store, folder, connect, lambda trial, visit: None)
        self._told: dict[str, Any] = {
            "shards": [None] * num_shards,
            "batch_size": batch_size,
            "accumulate": window,
            "recompute": recompute,
            "schedule": "sharp",
        }
        known = [budget for budget in budgets if budget is not None]
        self.state = CheckedState(budgets, host_budget, double_buffering=double_buffering)
        if context is None:
            context = fork_server(["transformers.modeling_utils"])  # as those of all other tests
        self.settings = DeviceSettings(context, opener, double_buffering, poison=True)
        self.trainer = QueueTrainer(
            ME,
            [self._start] * len(budgets),
            self.state,
            RunPlanner(lambda split, partition: rows, min(known, default=None)),
            self.store,
            fetch_manager,
            self.reported.put,
            lambda record: None,
            lambda attempt: None,
            self.reported.put,
            self._scratch.name,
            partial(TaskWatch, batch_seconds, None, print),
        )
        self.store.on_change = self.trainer.look_again
        self.trainer.start()

    def _start(self, on_answer: Any, on_gone: Any) -> DeviceProcess:
        device = DeviceProcess(self.settings, self.slabs, on_answer, on_gone, print)
        self.devices.append(device)
        return device

    def perform(self, task: Task) -> None:
        """Give the worker a task, as a coordinator would."""
        spec: Any = SimpleNamespace(trial=task.trial, **self._told)
        self.trainer.learn(spec)
        self.trainer.accept(task.attempt)
        self.trainer.perform(task, None)

    def put(self, trial: int, visit: int, state: Sequence[Segments], step: int = 0) -> None:
        """Publish a state here, as a fetch would."""
        announced = self.store.expect(trial, visit, len(state))
        for number, segments in enumerate(state):
            named = {}
            for name, content in segments.items():
                buffer = self.store.segments.allocate(content.nbytes)
                buffer[:] = content
                named[name] = (digest(buffer), buffer)
            self.store.put(announced, number, Shard(named, {"step": step} if step else {}))

    def get(self, trial: int, visit: int, shards: int) -> list[Segments]:
        """Return copies of a state that was published."""
        found = [self.store.wait(trial, visit, k, lambda: True).segments for k in range(shards)]
        return [{name: b.copy() for name, (_, b) in each.items()} for each in found]

    def result(self) -> Any:
        """Return the next thing that the worker reports, but for ends that are near."""
        while True:
            report = self.reported.get(timeout=SECONDS)
            if isinstance(report, Exception):
                raise report
            if not isinstance(report, events.SubEpochEnding):
                return report

    def close(self) -> None:
        self.trainer.close()
        self._scratch.cleanup()


@contextmanager
def bench(*args: Any, **options: Any) -> Iterator[QueueBench]:
    """Make a bench, and end its devices whatever happens."""
    made = QueueBench(*args, **options)
    try:
        yield made
    finally:
        made.close()
