"""One worker with trials of bytes, without a coordinator or a network, on devices anywhere."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from benchmarks.queue_worker import (
    DelaySpec,
    QueueWorker,
    evaluate,
    in_this_process,
    train,
)
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings
from cerebro_hydra.agent.device.runtime import Lane
from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.hopper.protocol.agent_spec import DEFAULT_LIMITS, LossLimits
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    Answer,
    DeviceLost,
    ShardArrived,
    VisitAdded,
    VisitCancelled,
    VisitEnded,
    VisitRestarted,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.ledger import PartBytes
from cerebro_hydra.plan.queues.pick import Rule, sharp
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.validate import MemoryCheck
from cerebro_hydra.testing.local_backend import fork_server
from tests.agent.byte_visits import trained
from tests.agent.standins import SECONDS

MICROBATCHES, BATCH = 10, 4
SIZES = (1000, 3000, 2000)
POISONED = partial(DeviceMemory, poison=True)

Place = Literal["processes", "thread", "resident", "main"]
"""Where devices are: in processes of their own, on a thread of this process, there in the worker's
memory, or on the thread that waits for results, in the worker's memory."""


class CheckedState(WorkerState):
    """The queues, with every action checked by where shards were when it began and ended."""

    def __init__(
        self,
        budgets: Sequence[int | None],
        host: int | None = None,
        rule: Rule = sharp,
        **options: Any,
    ) -> None:
        super().__init__(budgets, host, rule, **options)
        self._bytes: dict[tuple[int, int], int] = {}
        self._work: dict[tuple[int, int], int] = {}
        self._keeping: set[int] = set()
        self._at_home: set[int] = set()
        self._apart: dict[tuple[int, int], PartBytes] = {}
        self.check = MemoryCheck(
            dict(enumerate(budgets)),
            host,
            self._bytes,
            self._work,
            self._keeping,
            self._apart,
            self._at_home,
        )
        self._tasks: dict[int, deque[Action]] = {n: deque() for n, _ in enumerate(budgets)}
        self.added: list[VisitSpec] = []
        self.tasks = 0  # of all visits, that were computed
        self.computed = Counter[int]()  # tasks of each device
        self.given: list[Action | VisitEnded | VisitRestarted] = []
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
                case VisitAdded():
                    self.added.append(event.spec)
                    if event.spec.keeps_all and event.spec.graph.training:
                        self._keeping.add(event.spec.visit)
                    if event.spec.updates_at_home:
                        self._at_home.add(event.spec.visit)
                    for number, shard in enumerate(event.spec.shards):
                        self._bytes[event.spec.visit, number] = shard.state
                        self._work[event.spec.visit, number] = shard.activations
                        self._apart[event.spec.visit, number] = shard.apart
                case VisitCancelled():
                    self.check.abandon(event.visit)
                case DeviceLost():
                    self.check.lose(event.device)
                    self._tasks[event.device].clear()
                case ShardArrived():
                    self.check.end(Action(event.visit, event.shard, ActionKind.RECV))
                case ActionDone():
                    self.check.end(event.action)
                    if event.action.kind.computes:
                        self.tasks += 1
                        self.computed[event.action.device or 0] += 1
                        self._end_task(self._tasks[event.action.device or 0])
        answers = super().handle(events)
        for answer in answers:
            self.given += answer if isinstance(answer, tuple) else [answer]
        for answer in answers:
            if isinstance(answer, VisitRestarted):
                self.check.abandon(answer.visit)
            elif isinstance(answer, tuple):
                tasks = self._tasks[answer[0].device or 0]
                if not tasks:
                    self.check.begin(answer[0])
                tasks.extend(answer)
            elif isinstance(answer, Action):
                if answer.kind is ActionKind.RECV:
                    self.check.begin_anew(answer.trial)
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
    shards: int, window: int = 1, recompute: bool | None = None, batch_size: int = BATCH
) -> Callable[[int], Any]:
    """Return what describes trials to a worker, as far as its queues ask."""
    return lambda trial: DelaySpec(trial, (None,) * shards, batch_size, window, recompute)


class QueueBench(QueueWorker):
    """One worker with memory that shows stale reads.

    Every action that the queues gave is checked against the places and bytes of shards as they were
    when it was given and answered.
    """

    state: CheckedState

    def __init__(
        self,
        trials: Any,
        budgets: Sequence[int | None] = (None,),
        host_budget: int | None = None,
        place: Place = "processes",
        *,
        spec: Callable[[int], Any] | None = None,
        rule: Rule = sharp,
        rows: int = MICROBATCHES * BATCH,
        recompute: bool | None = None,
        double_buffering: bool = True,
        context: Any = None,
        make_memory: Any = POISONED,
        prepare: Any = None,
        limits: LossLimits = DEFAULT_LIMITS,
        end_process: Callable[[], object] = os.abort,
        trained: float = 0.0,
        **options: Any,
    ) -> None:
        self.trials = trials
        self.devices: list[DeviceProcess] = []  # the present process of each device comes last
        self.begun: list[int] = []  # attempts whose code ran in this process
        resident, lane = place in ("resident", "main"), Lane("main") if place == "main" else None
        if place == "processes":
            if context is None:  # as those of all other tests
                context = fork_server(["transformers.modeling_utils"])
            settings = (context, trials, double_buffering, make_memory, prepare, limits)
            start: Any = partial(self._start, DeviceSettings(*settings))
        else:
            start = in_this_process(
                trials, resident, double_buffering, end_process, self.begun.append, lane
            )
        known = [budget for budget in budgets if budget is not None]
        buffers = double_buffering and not resident
        super().__init__(
            start,
            CheckedState(budgets, host_budget, rule, double_buffering=buffers),
            min(known, default=None),
            rows,
            spec or spec_of(len(trials.sizes), trials.window, recompute),
            resident=resident,
            poison=True,
            lane=lane,
            **options,
        )
        self.audits.budget.trained = trained  # seconds, of which audits may take a share

    def _start(
        self, settings: DeviceSettings, slabs: Slabs, on_answer: Any, on_gone: Any
    ) -> DeviceProcess:
        device = DeviceProcess(settings, slabs, print, on_answer, on_gone)
        self.devices.append(device)
        return device

    def begin(self, number: int, evaluated: bool = False) -> None:
        """Let so many trials train their first sub-epoch, or be evaluated before it."""
        for trial in range(number):
            self.put(trial, 0, self.trials.initial(trial))
            self.perform(evaluate(trial, trial, 0) if evaluated else train(trial, trial, 1))

    def result(self, seconds: float | None = SECONDS) -> Any:
        return super().result(seconds)

    def results(self, number: int) -> dict[int, Any]:
        """Return the next results by their attempts."""
        return {result.attempt: result for result in (self.result() for _ in range(number))}

    def end(self, number: int) -> list[Any]:
        """Check the bytes of so many sub-epochs, and return what was told of them."""
        results = self.results(number)
        for trial, result in results.items():
            self.check(trial, result)
        return [*results.values()]

    def check(self, trial: int, result: Any) -> None:
        """Check that a trial's first sub-epoch has the bytes of plain training."""
        expected, loss_sum = trained(self.trials, self.trials.initial(trial), MICROBATCHES)
        assert isinstance(result, events.SubEpochDone), result
        assert result.loss_sum == loss_sum
        found = self.get(trial, 1, len(self.trials.sizes))
        for shard, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            for name in theirs:
                assert mine[name].tobytes() == theirs[name].tobytes(), f"{name} of shard {shard}"


@contextmanager
def bench(*args: Any, **options: Any) -> Iterator[QueueBench]:
    """Make a bench, and end its devices whatever happens."""
    made = QueueBench(*args, **options)
    try:
        yield made
    finally:
        made.close()
