"""A device moves shards beside its computing, each way on its own, and says whose code runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.agent.device import logs
from cerebro_hydra.agent.device.device import Device, DeviceMemory, Lane
from cerebro_hydra.agent.device.messages import (
    Close,
    Closed,
    Compute,
    Computed,
    Done,
    Move,
    Open,
    Opened,
    Profile,
    RunOrder,
)
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.engine.layout import Bytes, Segments
from cerebro_hydra.testing.queue_worker import train
from tests.agent.byte_runs import ByteTrials
from tests.agent.standins import SECONDS


def started() -> Lane:
    """Return a thread on which a device may compute."""
    lane = Lane("device-computes")
    lane.start()
    return lane


class PatientMemory(DeviceMemory):
    """Writes nothing back before two shards were brought."""

    def __init__(self) -> None:
        super().__init__(poison=True)
        self._brought = threading.Semaphore(0)

    def promote(self, slabs: Mapping[str, Bytes], gradients: int) -> Segments:
        slots = super().promote(slabs, gradients)
        self._brought.release()
        return slots

    def demote(self, slots: Segments, slabs: Mapping[str, Bytes]) -> None:
        assert all(self._brought.acquire(timeout=SECONDS) for _ in range(2)), "nothing was brought"
        super().demote(slots, slabs)


def test_a_shard_is_brought_while_another_one_is_written_back() -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    trials = ByteTrials((8, 8))
    device = Device(trials, PatientMemory(), answers.put, started())
    device.start()
    spec: Any = None
    device.give(Open(RunOrder(0, spec, train(0, 0, 1), 0, recompute=True)))
    slabs = [{name: np.full(8, k, np.uint8) for name in ("frozen", "trainable")} for k in range(2)]
    moves = [
        Action(0, 0, ActionKind.LOAD, device=0),
        Action(0, 0, ActionKind.SPILL, device=0),
        Action(0, 1, ActionKind.LOAD, device=0),
    ]
    try:
        assert answers.get(timeout=SECONDS) == Opened(0)
        device.give(Move(moves[0], slabs[0], {"step": 0}))
        assert answers.get(timeout=SECONDS).action == moves[0]
        for action in moves[1:]:
            device.give(Move(action, slabs[action.shard], {"step": 0}))
        done = [answers.get(timeout=SECONDS) for _ in range(2)]
    finally:
        device.close()
    assert all(isinstance(each, Done) for each in done)
    assert {each.action for each in done} == set(moves[1:])


class CountingMemory(DeviceMemory):
    """Counts the shards that have slots."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.brought, self.computing = threading.Event(), threading.Event()

    def promote(self, slabs: Mapping[str, Bytes], gradients: int) -> Segments:
        self.now += 1
        self.most = max(self.most, self.now)
        self.brought.set()
        return super().promote(slabs, gradients)

    def give_up(self, slots: Segments) -> None:
        self.now -= 1
        super().give_up(slots)


class WaitingTrials(ByteTrials):
    """Computes for trial 1 until one more shard is brought, or it is clear that none will be."""

    def __init__(self, memory: CountingMemory) -> None:
        super().__init__((8,))
        self._memory = memory

    def open(self, order: RunOrder) -> Any:
        run = super().open(order)
        if order.run == 1:
            run.perform = self._wait
        return run

    def _wait(self, task: Action, then: Any = None) -> Done:
        self._memory.brought.clear()
        self._memory.computing.set()
        self._memory.brought.wait(0.3)
        return Done(task)


@pytest.mark.parametrize("cancelled", [True, False])
def test_no_shard_is_brought_before_the_one_whose_place_it_takes_is_given_up(
    cancelled: bool,
) -> None:
    answers, memory = queue.SimpleQueue[Any](), CountingMemory()
    trials = WaitingTrials(memory)
    device = Device(trials, memory, answers.put, started())
    device.start()
    spec: Any = None
    loads = [Action(run, 0, ActionKind.LOAD, device=0) for run in range(3)]
    forwards = [Action(run, 0, ActionKind.F, 0, device=0) for run in range(2)]
    for run in range(3):
        device.give(Open(RunOrder(run, spec, train(run, run, 1), 0, recompute=False)))
    for load in loads[:2]:
        device.give(Move(load, trials.initial(0)[0], {"step": 0}))
        wait_for(answers, load)
    device.give(Compute((forwards[0],)))
    wait_for(answers, forwards[0])
    device.give(Compute((forwards[1],)))
    assert memory.computing.wait(SECONDS)
    if cancelled:
        device.give(Close(0, cancelled=True))
    device.give(Move(replace(loads[0], kind=ActionKind.DROP)))
    device.give(Move(loads[2], trials.initial(0)[0], {"step": 0}))
    wait_for(answers, loads[2])
    device.close()
    assert memory.most == 2


def wait_for(answers: queue.SimpleQueue[Any], action: Action) -> None:
    found = None
    while found != action:
        answer = answers.get(timeout=SECONDS)
        (done,) = answer.tasks if isinstance(answer, Computed) else (answer,)
        found = getattr(done, "action", None)


def test_it_names_the_attempt_whose_code_runs_not_the_one_that_came_last() -> None:
    trials, begun, answers = ByteTrials((64,)), [], queue.SimpleQueue[Any]()
    device = Device(trials, DeviceMemory(), answers.put, started(), begin=begun.append)
    device.start()
    spec: Any = SimpleNamespace(trial=0)
    device.give(Profile(spec, attempt=10))
    for run in (0, 1):
        device.give(Open(RunOrder(run, spec, train(10 + run, run, 1), 0, recompute=True)))
        load = Action(run, 0, ActionKind.LOAD, device=0)
        device.give(Move(load, trials.initial(run)[0]))
    wait_for(answers, Action(1, 0, ActionKind.LOAD, device=0))
    forward = Action(0, 0, ActionKind.F, 0, device=0)
    for task in (forward, replace(forward, kind=ActionKind.B), replace(forward, trial=1)):
        device.give(Compute((task,)))
        wait_for(answers, task)
    assert begun == [10, 11, 10, 11]
    device.close()


def unit_of(run: int, kind: ActionKind = ActionKind.F) -> Compute:
    return Compute((Action(run, 0, kind, 0, device=0),))


@pytest.mark.parametrize("double_buffering", [True, False])
def test_of_runs_that_ended_failed_or_were_cancelled_nothing_is_left(
    double_buffering: bool,
) -> None:
    trials, answers = ByteTrials((8,), faulty=frozenset({1})), queue.SimpleQueue[Any]()
    lane = started()
    device = Device(trials, DeviceMemory(), answers.put, lane, double_buffering=double_buffering)
    device.start()
    spec: Any = None
    for run in range(60):
        trial = run % 3
        device.give(Open(RunOrder(run, spec, train(run, trial, 1), 0, recompute=True)))
        load = Action(run, 0, ActionKind.LOAD, device=0)
        device.give(Move(load, trials.initial(trial)[0], {"step": 0}))
        wait_for(answers, load)
        device.give(unit_of(run))
        wait_for(answers, unit_of(run).tasks[0])
        if trial == 1:  # fails
            device.give(unit_of(run, ActionKind.B))
            wait_for(answers, unit_of(run, ActionKind.B).tasks[0])
        if trial:
            device.give(Close(run, cancelled=True))
            device.give(unit_of(run))  # comes late, and is answered
            wait_for(answers, unit_of(run).tasks[0])
        device.give(Move(replace(load, kind=ActionKind.DROP)))
        if not trial:
            device.give(Close(run))
            while answers.get(timeout=SECONDS) != Closed(run, trials_ended()):
                pass
    for each in device._lanes:
        done = threading.Event()
        each.put(done.set)
        assert done.wait(SECONDS)
    device.close()
    kept = {
        name: value for name, value in vars(device).items() if isinstance(value, dict | set | list)
    }
    assert kept and not any(kept.values()), kept


def trials_ended() -> Evaluation:
    """Return what a run of bytes gives that evaluated nothing."""
    return Evaluation({"loss": (0.0, 0)}, {})


def test_a_unit_of_a_run_that_is_over_is_nobodys_code() -> None:
    trials, begun, answers = ByteTrials((8,)), [], queue.SimpleQueue[Any]()
    device = Device(trials, DeviceMemory(), answers.put, started(), begin=begun.append)
    device.start()
    spec: Any = None
    for run in (0, 1):
        device.give(Open(RunOrder(run, spec, train(10 + run, run, 1), 0, recompute=True)))
    device.give(Close(0, cancelled=True))
    device.give(unit_of(0))
    wait_for(answers, unit_of(0).tasks[0])
    assert begun == [10, 11], "no attempt is said to begin that was taken back"
    assert logs._trial is None, "what is printed from now on is of no trial"
    device.close()
