"""A device in the agent's own process says whose code runs, in case it ends the process."""

from __future__ import annotations

import queue
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cerebro_hydra.agent.device import Device
from cerebro_hydra.agent.device_memory import DeviceMemory
from cerebro_hydra.agent.device_messages import Compute, Move, Open, Profile, RunOrder
from cerebro_hydra.plan.actions import Action, ActionKind
from tests.agent.byte_runs import ByteTrials
from tests.agent.queue_bench import train
from tests.agent.standins import SECONDS


def wait_for(answers: queue.SimpleQueue[Any], action: Action) -> None:
    while getattr(answers.get(timeout=SECONDS), "action", None) != action:
        pass


def test_it_names_the_attempt_whose_code_runs_not_the_one_that_came_last() -> None:
    trials, begun, answers = ByteTrials((64,)), [], queue.SimpleQueue[Any]()
    device = Device(trials, DeviceMemory(), answers.put, begin=begun.append)
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
