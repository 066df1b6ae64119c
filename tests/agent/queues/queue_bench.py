"""Drives the queues of a worker with real devices, without a coordinator or a network."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from cerebro_hydra.agent.device.device import DeviceMemory
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.hopper.protocol.agent_spec import DEFAULT_LIMITS, LossLimits
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import (
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
from cerebro_hydra.plan.queues.run_progress import RunSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.pick import sharp
from cerebro_hydra.plan.schedules.validate import MemoryCheck
from cerebro_hydra.testing.local_backend import fork_server
from cerebro_hydra.testing.queue_worker import QueueWorker
from tests.agent.standins import SECONDS

POISONED = partial(DeviceMemory, poison=True)


class CheckedState(WorkerState):
    """The queues, with every action checked by where shards were when it began and ended."""

    def __init__(self, budgets: Sequence[int | None], host: int | None, **options: Any) -> None:
        super().__init__(budgets, host, sharp, **options)
        self._bytes: dict[tuple[int, int], int] = {}
        self._work: dict[tuple[int, int], int] = {}
        self._keeping: set[int] = set()
        self.check = MemoryCheck(
            dict(enumerate(budgets)), host, self._bytes, self._work, self._keeping
        )
        self._tasks: dict[int, deque[Action]] = {n: deque() for n, _ in enumerate(budgets)}
        self.added: list[RunSpec] = []
        self.tasks = 0  # of all runs, that were computed
        self.given: list[Answer] = []
        self._handled = threading.Condition()

    def wait_until(self, holds: Callable[[], object]) -> None:
        """Wait until something holds when events were handled."""
        with self._handled:
            assert self._handled.wait_for(holds, SECONDS)

    def wait_for_tasks(self, number: int) -> None:
        """Wait until so many tasks were computed since the start."""
        self.wait_until(lambda: self.tasks >= number)

    def handle(self, events: Iterable[WorkerEvent]) -> list[Answer]:
        with self._handled:
            answers = self._handle(events)
            self._handled.notify_all()
        return answers

    def _handle(self, events: Iterable[WorkerEvent]) -> list[Answer]:
        for event in events:
            match event:
                case RunAdded():
                    self.added.append(event.spec)
                    if event.spec.keeps_all and event.spec.graph.training:
                        self._keeping.add(event.spec.run)
                    for number, shard in enumerate(event.spec.shards):
                        self._bytes[event.spec.run, number] = shard.state
                        self._work[event.spec.run, number] = shard.activations
                case RunCancelled() | RunReleased():
                    self.check.abandon(event.run)
                case DeviceLost():
                    self.check.lose(event.device)
                    self._tasks[event.device].clear()
                case ShardArrived():
                    self.check.end(Action(event.run, event.shard, ActionKind.RECV))
                case ActionDone():
                    self.check.end(event.action)
                    if event.action.kind.computes:
                        self.tasks += 1
                        self._end_task(self._tasks[event.action.device or 0])
        answers = super().handle(events)
        self.given += answers
        for answer in answers:
            if isinstance(answer, RunRestarted):
                self.check.abandon(answer.run)
            elif isinstance(answer, Action) and answer.kind.computes:
                tasks = self._tasks[answer.device or 0]
                tasks.append(answer)
                if len(tasks) == 1:
                    self.check.begin(answer)
            elif isinstance(answer, Action):
                self.check.begin(answer)
                if answer.kind is ActionKind.DROP:
                    self.check.end(answer)
        self.validate()
        return answers

    def _end_task(self, tasks: deque[Action]) -> None:
        """Begin the next of the tasks that a device was given together."""
        tasks.popleft()
        if tasks:
            self.check.begin(tasks[0])


def spec_of(
    num_shards: int,
    batch_size: int,
    window: int,
    recompute: bool | None,
    trial: int,
) -> Any:
    """Describe a trial to a worker, as far as its queues ask."""
    return SimpleNamespace(
        trial=trial,
        shards=[None] * num_shards,
        batch_size=batch_size,
        accumulate=window,
        recompute=recompute,
        schedule="sequential",
    )


class QueueBench(QueueWorker):
    """One worker with devices in processes of their own, and memory that shows stale reads.

    Every action that the queues gave is checked against the places and bytes of shards as they were
    when it was given and answered.
    """

    state: CheckedState

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
        audit_share: float = 0.0,
        make_memory: Any = POISONED,
        prepare: Any = None,
        limits: LossLimits = DEFAULT_LIMITS,
    ) -> None:
        self.devices: list[DeviceProcess] = []  # the present process of each device comes last
        if context is None:
            context = fork_server(["transformers.modeling_utils"])  # as those of all other tests
        self.settings = DeviceSettings(
            context, opener, double_buffering, make_memory, prepare, limits
        )
        known = [budget for budget in budgets if budget is not None]
        super().__init__(
            self._start,
            CheckedState(budgets, host_budget, double_buffering=double_buffering),
            min(known, default=None),
            rows,
            partial(spec_of, num_shards, batch_size, window, recompute),
            poison=True,
            batch_seconds=batch_seconds,
            audit_share=audit_share,
        )

    def _start(self, slabs: Slabs, on_answer: Any, on_gone: Any) -> DeviceProcess:
        device = DeviceProcess(self.settings, slabs, print, on_answer, on_gone)
        self.devices.append(device)
        return device

    def result(self, seconds: float | None = SECONDS) -> Any:
        return super().result(seconds)


@contextmanager
def bench(*args: Any, **options: Any) -> Iterator[QueueBench]:
    """Make a bench, and end its devices whatever happens."""
    made = QueueBench(*args, **options)
    try:
        yield made
    finally:
        made.close()
