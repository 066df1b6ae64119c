"""A device in the agent's own memory: one call takes the tasks of a microbatch as they come."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.agent.device.device import Device, DeviceMemory, Lane
from cerebro_hydra.agent.device.messages import (
    Close,
    Closed,
    Compute,
    Computed,
    Done,
    Failed,
    Move,
    Open,
    Profile,
    Profiled,
    RunOrder,
)
from cerebro_hydra.agent.device.process import WorkerDevices
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import Answer
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.testing.queue_worker import QueueWorker, in_this_process, train
from tests.agent.byte_runs import ByteRun, ByteTrials
from tests.agent.queues.queue_bench import CheckedState, spec_of
from tests.agent.queues.test_agent_queue_trainer import assert_trained

SIZES = (1000, 2000, 1500)
PATIENCE = 20.0  # seconds after which a worker counts as standing still


class ResidentRun(ByteRun):
    """Makes all tasks of a microbatch in one call."""

    stays = True

    def unload(self, shard: int) -> tuple[Any, bool]:
        return dict(self.cursors[shard]), False

    def close(self) -> Evaluation | None:
        self.shards.clear()
        return super().close()

    def perform(self, task: Action, then: Any = None) -> Done:
        while True:
            done = super().perform(task)
            first = task.kind is ActionKind.B and task.shard == 0
            if first or (task.kind is ActionKind.U and then is None):
                return done
            task = then(done)


@dataclass(frozen=True)
class ResidentTrials(ByteTrials):
    """Opens such runs."""

    def open(self, order: RunOrder) -> ByteRun:
        return ResidentRun(self, order)


@dataclass(frozen=True)
class HangsWhenSparing(ByteTrials):
    """Runs out of memory once, and hangs when it is to need less, until it is let go."""

    let_go: threading.Event = field(default_factory=threading.Event)

    def open(self, order: RunOrder) -> ByteRun:
        run = ResidentRun(self, order)
        if order.recompute:
            run.perform = lambda task, then=None: self.let_go.wait()  # type: ignore[method-assign]
        return run


@dataclass(frozen=True)
class WritesToFrozen(ByteTrials):
    """Trial 0 writes to the frozen bytes that others share, and says so.

    It goes on when it is let go, and raises then if it is ``faulty``.
    """

    wrote: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)

    def open(self, order: RunOrder) -> ByteRun:
        run = ResidentRun(self, order)
        if order.task.trial == 0:
            perform = run.perform

            def writes(task: Action, then: Any = None) -> Done:
                run.shards[0]["frozen"][:] = 99
                self.wrote.set()
                assert self.let_go.wait(PATIENCE)
                return perform(task, then)

            run.perform = writes  # type: ignore[method-assign]
        return run


class SlowFolder:
    """Reads objects of a run folder once it is let."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self.asked, self.let = threading.Event(), threading.Event()

    def read_object(self, digest: str, allocate: Callable[[int], Any]) -> Any:
        self.asked.set()
        assert self.let.wait(PATIENCE)
        return self._folder.read_object(digest, allocate)


@pytest.fixture
def made() -> Iterator[Callable[..., QueueWorker]]:
    """Make a worker that computes in its own memory."""
    workers = []

    def make(trials: ByteTrials, **options: Any) -> QueueWorker:
        def spec(trial: int) -> Any:
            found = spec_of(len(SIZES), 4, 1, None, trial)
            found.tasks = None
            return found

        state = CheckedState([None], None, double_buffering=False)
        start = in_this_process(trials, in_place=True, **options.pop("device", {}))
        worker = QueueWorker(start, state, None, 40, spec, resident=True, **options)
        workers.append(worker)
        worker.put(0, 0, trials.initial(0))
        return worker

    yield make
    for each in workers:
        each.trainer.stop()


def test_a_run_that_is_overdue_after_it_began_again_fails_alone(
    made: Callable[..., QueueWorker],
) -> None:
    trials = HangsWhenSparing(SIZES, greedy=frozenset({0}))
    ended = threading.Event()
    worker = made(trials, batch_seconds=0.5, device={"end_process": ended.set})
    worker.perform(train(0, 0, 1))
    failed = worker.result(PATIENCE)
    assert isinstance(failed, events.TaskFailed)
    assert "longer than batch_seconds=0.5" in failed.error
    assert ended.wait(PATIENCE)
    trials.let_go.set()


@pytest.mark.parametrize("failed", [False, True])
def test_what_a_run_wrote_to_frozen_bytes_is_mended_before_another_one_reads_them(
    made: Callable[..., QueueWorker], tmp_path: Path, failed: bool
) -> None:
    trials = WritesToFrozen(SIZES, faulty=frozenset({0} if failed else ()))
    worker, folder = made(trials), stored(trials, tmp_path)
    worker.trainer._fetch_manager._folder = folder  # type: ignore[assignment]
    worker.put(1, 0, trials.initial(1))
    for trial in range(2):
        worker.perform(train(trial, trial, 1))
    assert trials.wrote.wait(PATIENCE)
    assert frozen_of(worker, 1) != frozen(trials)[0]
    if not failed:
        worker.trainer.cancel(0)
    trials.let_go.set()
    assert folder.asked.wait(PATIENCE)
    worker.state.wait_until(lambda: any(map(is_forward_of_the_other, worker.state.given)))
    idle = threading.Event()
    worker.trainer._loop.put(idle.set)
    assert idle.wait(PATIENCE), "the loop waits for the store"
    assert worker.reported.empty(), "nothing is told before the bytes are as they were"
    folder.let.set()
    results = {
        result.attempt: result for result in (worker.result(PATIENCE) for _ in range(1 + failed))
    }
    assert_trained(worker, trials, 1, results[1], trials.initial(1))
    assert frozen_of(worker, 1) == frozen(trials)[0]
    if failed:
        assert "the user's code is wrong" in results[0].error


def is_forward_of_the_other(answer: Answer) -> bool:
    """Return whether the queues let the run after the first one begin."""
    return isinstance(answer, Action) and (answer.kind, answer.trial) == (ActionKind.F, 1)


def frozen(trials: ByteTrials) -> list[bytes]:
    """Return the frozen bytes of every shard, which all trials share."""
    return [each["frozen"].tobytes() for each in trials.initial(0)]


def frozen_of(worker: QueueWorker, trial: int) -> bytes:
    """Return the frozen bytes of a trial's first shard as they are in memory now."""
    return worker.store.wait(trial, 0, 0, lambda: True).segments["frozen"][1].tobytes()


def stored(trials: ByteTrials, path: Path) -> SlowFolder:
    """Return a run folder that has the frozen bytes."""
    folder = RunFolder(LocalStore(str(path)), "run")
    for content in frozen(trials):
        folder.write_object(digest(np.frombuffer(content, np.uint8)), content)
    return SlowFolder(folder)


class StubRun:
    """Asks for a second task within its call."""

    stays = resident = True

    def perform(self, task: Action, then: Any = None) -> Done:
        return Done(then(Done(task)))

    def moved(self, slots: Any) -> Any:
        return slots

    def load(self, *given: Any) -> None: ...

    def unload(self, shard: int) -> Any:
        return {}, False

    def cancel(self) -> None: ...


class StubOpener:
    """Opens such runs."""

    def open(self, order: RunOrder) -> Any:
        return StubRun()


class WatchedLane(Lane):
    """Calls something after each thing that it did."""

    def __init__(self) -> None:
        super().__init__("main")
        self.after: Callable[[], object] = lambda: None

    def step(self) -> bool:
        more = super().step()
        self.after()
        return more


def test_a_unit_that_comes_right_before_its_run_is_cancelled_is_answered() -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    lane, opener = WatchedLane(), StubOpener()
    device = Device(
        opener,  # type: ignore[arg-type]
        DeviceMemory(in_place=True),
        answers.put,
        lane,
        double_buffering=False,
    )
    slabs = {name: np.zeros(64, np.uint8) for name in ("frozen", "trainable")}
    forward = Action(0, 0, ActionKind.F, 0, device=0)
    backward = Action(0, 0, ActionKind.B, 0, device=0)
    trial: Any = None
    device.give(Open(RunOrder(0, trial, train(0, 0, 1), 0, False, resident=True)))
    device.give(Move(Action(0, 0, ActionKind.LOAD, device=0), slabs))
    device.give(Compute((forward,)))
    lane.start()
    while not isinstance(answers.get(timeout=PATIENCE), Computed):
        pass
    lane.after = lambda: device.give(Close(0, cancelled=True))  # before the call looks for it
    device.give(Compute((backward,)))
    answered = answers.get(timeout=PATIENCE)
    assert isinstance(answered, Computed)
    assert [done.action for done in answered.tasks] == [backward]
    device.close()


@pytest.mark.parametrize("failed", [False, True])
def test_a_profile_may_be_answered_after_what_was_asked_later(failed: bool) -> None:
    asked: list[Any] = []
    device: Any = type(
        "Asked", (), {"limits": None, "give": lambda self, order: asked.append(order)}
    )()
    devices = WorkerDevices([lambda *hears: device], lambda *told: None, lambda *told: None)
    devices.start()
    trial: Any = type("Trial", (), {"trial": 1})()
    profile, unit = Profile(trial, 0), Compute((Action(0, 0, ActionKind.F, 0, device=0),))
    devices.ask(device, profile)
    devices.ask(device, unit)
    devices.ask(device, Close(0))
    nothing: Any = None
    answer = Failed(None, 1, nothing, "why") if failed else Profiled(1, nothing)
    assert devices.hear(device, Computed(())) is unit
    assert devices.hear(device, answer) is profile
    assert devices.hear(device, Closed(0, None)) == Close(0)
