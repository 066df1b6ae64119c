"""Devices die, freeze, or are late, while they or the host work: no byte changes."""

from __future__ import annotations

import itertools
import os
import queue
import random
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.queue_worker import evaluate, train
from cerebro_hydra.agent.attempts import AttemptReports, Outbox
from cerebro_hydra.agent.device.messages import (
    Alive,
    Answer,
    Move,
    Order,
    Profile,
    Profiled,
    Ready,
)
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings
from cerebro_hydra.agent.device.task_watch import TimeLimits
from cerebro_hydra.agent.device.worker_devices import OnAnswer, OnGone, WorkerDevice, WorkerDevices
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.agent.memory.shard_store import Shard, ShardHome, ShardStore, State
from cerebro_hydra.hopper.protocol.agent_spec import DEFAULT_LIMITS, LossLimits
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import VisitRestarted
from cerebro_hydra.testing.local_backend import fork_server
from tests.agent.byte_visits import ByteTrials
from tests.agent.device.late_runtime import late_memory
from tests.agent.queues.queue_bench import MICROBATCHES, SIZES, QueueBench, bench
from tests.agent.standins import SECONDS

BYTES = sum(size + size // 2 for size in SIZES)  # of a state
SOON = LossLimits(heartbeat_interval=0.1, missed_heartbeats=30)


@pytest.mark.parametrize("seed", range(8))
def test_any_budgets_neighbours_and_killed_devices_leave_the_bytes_alone(seed: int) -> None:
    choice = random.Random(seed)
    sizes = tuple(choice.randrange(64, 5000) for _ in range(choice.randrange(1, 5)))
    window, seconds = choice.choice([1, 1, 3]), choice.choice([0, 0.002])
    trials = ByteTrials(sizes, window, seconds, apart=seed % 2 and 50, at_home=seed % 4 == 3)
    need = trials.profile(0).training(0, 1, trials.window, True).device_need
    budgets = [choice.choice([need, 2 * need, None]) for _ in range(choice.randrange(1, 4))]
    number = choice.randrange(1, 5)
    tasks = 2 * number * MICROBATCHES * len(sizes)
    kills = sorted(choice.randrange(tasks) for _ in range(choice.choice([0, 1, 2])))
    host = choice.choice([None, 2 * need, 4 * sum(sizes)])
    options = {"double_buffering": choice.random() < 0.7, "recompute": choice.choice([None, True])}
    with bench(trials, budgets, host, **options) as made:
        made.begin(number)
        for done in kills:
            made.state.wait_for_tasks(done)
            made.devices[-len(budgets)].close()  # one of the present ones
        made.end(number)
        for trial in range(number):
            made.perform(evaluate(10 + trial, trial, 1))
        for _ in range(number):
            assert isinstance(made.result(), events.EvaluationDone)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_device_that_freezes_or_whose_code_ends_it_is_replaced(
    tmp_path: Path, frozen: bool
) -> None:
    lethal = tmp_path / "now"
    trials = ByteTrials(SIZES, seconds=0.006, lethal=None if frozen else str(lethal))
    lethal.touch()
    with bench(trials, [4500, 4500], limits=SOON) as made:
        made.begin(3)
        if frozen:
            made.state.wait_until(lambda: made.state.computed[1] >= 5)  # it is ready
            os.kill(made.devices[1].pid, signal.SIGSTOP)
        made.end(3)
        assert len(made.devices) == 3


@pytest.mark.parametrize("double_buffering", [True, False])
def test_no_byte_is_used_before_it_has_come_or_after_it_has_gone(double_buffering: bool) -> None:
    options = {"double_buffering": double_buffering, "make_memory": late_memory}
    with bench(ByteTrials(SIZES, window=3, apart=300), (12_000, None), **options) as made:
        made.begin(3)
        made.end(3)


# ---------------------------------------------------------------------- while the host works


class Held:
    """Holds a function of the host from some moment on, until the test lets it go on."""

    def __init__(self, owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._asked, self._over = threading.Event(), threading.Event()
        self.since: Callable[[], object] = lambda: True
        self.error: Exception | None = None
        function = getattr(owner, name)

        def held(*arguments: Any) -> Any:
            if self.since():
                self._asked.set()
                assert self._over.wait(SECONDS)
                if self.error is not None:
                    raise self.error
            return function(*arguments)

        monkeypatch.setattr(owner, name, held)

    def result_of_a_loss(self, made: QueueBench) -> Any:
        """Let the device die meanwhile, and its visit begin anew; return what came of it."""
        assert self._asked.wait(SECONDS)
        made.devices[-1].close()
        made.state.wait_until(lambda: any(isinstance(e, VisitRestarted) for e in made.state.given))
        self._over.set()
        return made.result()


def test_a_write_back_that_waits_while_its_device_dies_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(ShardHome, "room_for", monkeypatch)
    with bench(ByteTrials(SIZES), [4500], recompute=True) as made:
        held.since = lambda: made.state.tasks > 20
        made.begin(1)
        made.check(0, held.result_of_a_loss(made))


def test_a_shard_that_is_published_while_its_run_begins_anew_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, put, states = Held(ShardHome, "published", monkeypatch), ShardStore.put, list[State]()

    def noted(store: ShardStore, state: State, number: int, shard: Shard) -> None:
        states.append(state)
        put(store, state, number, shard)

    monkeypatch.setattr(ShardStore, "put", noted)
    with bench(ByteTrials(SIZES, seconds=0.005), recompute=True) as made:
        made.begin(1)
        result = held.result_of_a_loss(made)
        made.check(0, result)
        assert result.nbytes == BYTES
        assert len(set(map(id, states))) == 3, "the state before, one that is void, and its like"


def test_a_device_that_dies_while_there_is_no_memory_for_its_changes_ends_no_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bench(ByteTrials(SIZES), [4500], recompute=True) as made:
        held = Held(SegmentStore, "allocate", monkeypatch)
        held.since, held.error = lambda: made.state.tasks, MemoryError("there is no room")
        made.begin(1)
        result = held.result_of_a_loss(made)
        assert isinstance(result, events.TaskFailed)
        assert "there is no room" in result.error
        monkeypatch.undo()
        made.begin(2)
        results = [*made.results(2).values()]
        assert all(isinstance(each, events.SubEpochDone) for each in results), results


# ---------------------------------------------------------------------- how devices end


def test_a_run_that_is_over_ends_its_devices_whatever_its_loop_does() -> None:
    busy = threading.Event()
    with bench(ByteTrials(SIZES, faults={0: "hangs"}), [4500, 4500]) as made:
        made.begin(1)
        made.state.wait_for_tasks(1)
        made.trainer._inbox.put(lambda: busy.wait(SECONDS))
        pids = [os.pidfd_open(device.pid) for device in made.devices]
        made.trainer.stop()
        ended = [select.select([pid], [], [], SECONDS / 2)[0] == [pid] for pid in pids]
        busy.set()
        assert ended == [True, True]
        for pid in pids:
            os.close(pid)


def test_a_device_ends_with_an_agent_that_is_killed() -> None:
    program = """
        import multiprocessing, sys
        from tests.agent.byte_visits import ByteTrials
        from tests.agent.queues.queue_bench import QueueBench

        trials = ByteTrials((1000, 3000), seconds=60)
        made = QueueBench(trials, context=multiprocessing.get_context("forkserver"))
        made.begin(1)
        print(made.devices[0].pid, flush=True)
        sys.stdin.read()
    """
    agent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    device = os.pidfd_open(int(agent.stdout.readline()))
    assert not select.select([device], [], [], 0)[0], "the device is there"
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    assert select.select([device], [], [], SECONDS)[0], "the device is gone"
    os.close(device)


@contextmanager
def ready(
    trials: ByteTrials, slabs: Slabs, limits: LossLimits = DEFAULT_LIMITS
) -> Iterator[tuple[DeviceProcess, queue.SimpleQueue[Answer], queue.SimpleQueue[WorkerDevice]]]:
    """Start a device's process, and give what gets its answers, and it when it is gone."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    gone: queue.SimpleQueue[WorkerDevice] = queue.SimpleQueue()
    settings = DeviceSettings(fork_server(["transformers.modeling_utils"]), trials, limits=limits)
    device = DeviceProcess(settings, slabs, print, lambda _, a: answers.put(a), gone.put)
    try:
        while answers.get(timeout=SECONDS) != Ready():
            pass
        yield device, answers, gone
    finally:
        device.close()


def test_orders_for_a_frozen_device_are_not_waited_for() -> None:
    limits = LossLimits(heartbeat_interval=0.1, missed_heartbeats=5)
    with ready(ByteTrials(SIZES), Slabs(), limits) as (device, _, gone):
        os.kill(device.pid, signal.SIGSTOP)
        trial: Any = bytes(1 << 20)  # which no pipe holds
        device.give(Profile(trial, 0))
        assert gone.get(timeout=SECONDS) is device


def test_a_device_that_an_order_could_not_be_sent_to_ends() -> None:
    """It would never answer that order, and lives; here no file descriptor is left to send."""
    slabs = Slabs()
    load = Move(Action(0, 0, ActionKind.LOAD, device=0), {"trainable": slabs.allocate(100)})
    with ready(ByteTrials(SIZES), slabs) as (device, _, gone):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with open(os.devnull) as next_file:
            number = next_file.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, limits[1]))
        try:
            device.give(load)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert gone.get(timeout=SECONDS) is device
        assert "could not be sent to it: [Errno 24]" in device.ending


class Unreadable:
    """Is read by nobody that it is sent to."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class UnreadableTrials(ByteTrials):
    def profile(self, trial: Any) -> Any:
        return Unreadable()


def test_a_device_whose_answer_can_not_be_read_ends() -> None:
    """It would be heard no more; so it is where the agent has no memory for an answer."""
    trial: Any = SimpleNamespace(trial=0)
    with ready(UnreadableTrials(SIZES), Slabs()) as (device, _, gone):
        device.give(Profile(trial, 0))
        assert gone.get(timeout=SECONDS) is device
        assert "can't be read: ValueError" in device.ending


class Quiet:
    """A device that does nothing but die."""

    ending = ""

    def __init__(self, limits: LossLimits | None) -> None:
        self.limits = limits
        self.kills = 0

    def give(self, order: Order) -> None:
        """Lose the order."""

    def kill(self, why: str) -> None:
        self.kills += 1

    def close(self) -> None:
        """Be closed already."""


def test_a_device_is_ended_once_after_its_time_without_a_sign_of_life() -> None:
    limits = LossLimits(join_timeout=60.0, heartbeat_interval=0.5, missed_heartbeats=20)
    made: list[Quiet] = []

    def start(limits: LossLimits | None) -> Any:
        def device(on_answer: OnAnswer, on_gone: OnGone) -> WorkerDevice:
            made.append(Quiet(limits))
            return made[-1]

        return device

    devices = WorkerDevices([start(limits), start(limits), start(None)], print, print)
    devices.start()
    silent, talking, here = made
    for _ in range(6):
        devices.hear(talking, Alive())
        devices.age(9.0)
    assert not silent.kills, "it may take 60 s to start"
    devices.age(9.0)
    assert (silent.kills, talking.kills, here.kills) == (1, 1, 0)
    devices.age(1e9)
    assert (silent.kills, talking.kills, here.kills) == (1, 1, 0), "nobody is ended twice"
    devices.replace(silent)
    devices.age(60.0)
    assert not made[-1].kills
    devices.hear(made[-1], Alive())
    devices.age(10.0)
    assert not made[-1].kills
    devices.age(0.25)
    assert made[-1].kills == 1


SLOW = 1.5  # seconds that a batch may take


@pytest.mark.parametrize(
    ("fault", "ending"),
    [
        ("dies: backward", "it ended with exit code 1"),
        ("segfaults", "it was ended by SIGSEGV"),
        ("dies and leaves a fork", "it ended with exit code 1"),
        pytest.param("stops itself", "it showed no life for 3 s", marks=pytest.mark.long),
    ],
)
def test_what_ends_or_stops_a_device_is_told_as_what_it_was_and_is_no_slow_batch(
    fault: str, ending: str
) -> None:
    trials = ByteTrials(SIZES, faults={1: fault})
    with bench(trials, [4500, 4500], limits=SOON, batch_seconds=SLOW) as made:
        made.begin(3)
        results = made.results(3)
        failed = results.pop(1)
        assert isinstance(failed, events.TaskFailed)
        first, *endings = failed.error.splitlines()
        assert first == "its code ended the process of a device 3 times"
        assert len(endings) == 3 and all(ending in each for each in endings), endings
        for trial, result in results.items():
            made.check(trial, result)


@pytest.mark.long
def test_a_sub_epoch_that_begins_anew_has_all_of_its_time_again() -> None:
    """It takes 2.7 s, and half of it is done twice."""
    with bench(ByteTrials(SIZES, seconds=0.03), [None]) as made:
        made.trainer._limits = TimeLimits(None, 4.5, print)
        made.begin(1)
        made.state.wait_for_tasks(75)
        made.devices[0].close()
        made.end(1)
        assert any(isinstance(each, VisitRestarted) for each in made.state.given)


def opened(path: Path, trial: int) -> None:
    path.open("w").close()


def test_an_attempt_that_was_taken_back_holds_its_device_no_longer_than_a_batch_may_take(
    tmp_path: Path,
) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    trials = ByteTrials(SIZES, faults={0: "hangs"}, hooks={"hangs": partial(opened, begun)})
    with bench(trials, [4500], batch_seconds=SLOW) as made:
        made.begin(2)
        begun.read_bytes()  # until its code hangs
        made.trainer.cancel(0)
        result = made.result()
        assert result.attempt == 1
        made.check(1, result)


def test_devices_that_die_together_of_a_task_count_as_one() -> None:
    no_fetches: Any = None
    reports = AttemptReports(Outbox("me", print, print, print, print), no_fetches)
    task = train(0, 0, 1)
    reports.accept(task.attempt)
    for time in range(2):
        first, *others = [Quiet(None) for _ in range(4)]
        for device in (first, *others):
            assert reports.died(task, device, {*others} - {device}) is None, time
    error = reports.died(task, Quiet(None), set())
    assert error is not None and "the process of a device 3 times" in error


def test_a_device_that_dies_while_the_last_shard_of_a_visit_is_published_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, published = Held(ShardHome, "published", monkeypatch), itertools.count(1)
    held.since = lambda: next(published) == len(SIZES)
    with bench(ByteTrials(SIZES), [4500], recompute=True) as made:
        made.begin(1)
        assert held._asked.wait(SECONDS)
        made.devices[0].close()
        made.state.wait_until(lambda: len(made.devices) == 2)
        held._over.set()
        made.check(0, made.result())
        assert not any(isinstance(each, VisitRestarted) for each in made.state.given)


def refuse_to_end(trial: int) -> None:
    if trial == 0:
        raise ValueError("it can't be ended")


@pytest.mark.parametrize("double_buffering", [True, False])
def test_a_device_whose_thread_ends_by_an_error_is_replaced(double_buffering: bool) -> None:
    """Its process lives on, shows life, and would answer nothing for ever."""
    trials = ByteTrials(SIZES, faults={0: "raises"}, hooks={"cancelled": refuse_to_end})
    with bench(trials, [None], double_buffering=double_buffering) as made:
        made.begin(2)
        results = made.results(2)
        assert isinstance(results[0], events.TaskFailed)
        made.check(1, results[1])


class Talkative:
    """Prints while it is sent, as what is collected meanwhile may."""

    def __reduce__(self) -> Any:
        print("I am sent")
        return int, ()


class TalkativeTrials(ByteTrials):
    def profile(self, trial: Any) -> Any:
        return Talkative()


def test_a_device_whose_code_prints_while_an_answer_is_sent_does_not_wait_for_itself() -> None:
    trial: Any = SimpleNamespace(trial=0)
    told: Any = Profiled(0, 0)
    with ready(TalkativeTrials(SIZES), Slabs()) as (device, answers, _):
        device.give(Profile(trial, 0))
        while answers.get(timeout=SECONDS) != told:
            pass
