"""Measures the share of time that delay devices are busy while everything is resident."""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks.queue_worker import DelayRun, DelaySpec, DelayTrials, QueueWorker
from cerebro_hydra.agent.device.messages import VisitOrder
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings, fork_server
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.plan.messages.actions import ActionKind
from cerebro_hydra.plan.queues.events import ActionDone, Answer, WorkerEvent
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK, PICKS
from cerebro_hydra.plan.queues.worker import WorkerState

DEVICES = (1, 2, 4)
MILLISECONDS = (1, 2, 5, 20)  # of a task
TRIALS = 2  # for each device
SHARDS = 4
NBYTES = 4096  # of a shard
ROWS = 4  # of a microbatch
SECONDS = 4.0  # for which the tasks of a device last
QUICK_SECONDS = 0.4
GOALS = {
    1: (0.90, 0.95, 0.98, 0.99),
    2: (0.90, 0.95, 0.98, 0.99),
    4: (0.80, 0.90, 0.97, 0.99),
}

_PR_SET_TIMERSLACK = 29  # of Linux's prctl


@dataclass(frozen=True)
class PreciseTrials(DelayTrials):
    """Waits that end within some 30 instead of 90 microseconds after their time."""

    def open(self, order: VisitOrder) -> DelayRun:
        """Open a visit on the thread that will wait."""
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        return super().open(order)


class Span:
    """Notes when the first task began that the queues heard of, and when the last one ended."""

    def __init__(self, state: WorkerState) -> None:
        self._handle = state.handle
        self.begin()
        state.handle = self._timed  # type: ignore[method-assign]

    def begin(self) -> None:
        self.begun, self.ended, self.tasks, self.computing = math.inf, 0.0, 0, 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    def _timed(self, events: Iterable[WorkerEvent]) -> list[Answer]:
        now, events = time.monotonic(), list(events)
        for event in events:
            if isinstance(event, ActionDone) and event.action.kind.computes:
                self.begun, self.ended = min(self.begun, now - event.seconds), now
                self.tasks += 1
                self.computing += event.seconds * (event.action.kind is not ActionKind.U)
        return self._handle(events)


@dataclass(frozen=True)
class Figure:
    """Holds what was measured.

    Args:
        busy: the share of the devices' time that tasks ask for.
        computing: the share in which devices were at a task, however late its wait ended.
        lost: seconds of a device for each task, beyond what the task asks for.
        agent: CPU seconds of the agent's process for each task.
    """

    busy: float
    computing: float
    lost: float
    agent: float


def measure(devices: int, milliseconds: float, pick: str, total: float, context: Any) -> Figure:
    """Train a sub-epoch of each trial; the clock runs from the first task to the last one."""
    seconds, trials = milliseconds / 1000, TRIALS * devices
    microbatches = max(2, round(total / (TRIALS * SHARDS * 2 * seconds)))
    numbers = range(trials + devices)  # the last ones only start the devices
    delays = PreciseTrials(
        SHARDS, dict.fromkeys(numbers, NBYTES), dict.fromkeys(numbers, seconds), 1.0, ROWS
    )
    settings = DeviceSettings(context, delays)

    def start(slabs: Slabs, on_answer: Any, on_gone: Any) -> DeviceProcess:
        return DeviceProcess(settings, slabs, print, on_answer, on_gone)

    worker = QueueWorker(
        start,
        WorkerState([None] * devices, None, PICKS[pick]),
        None,
        rows=microbatches * ROWS,
        spec_of=lambda trial: DelaySpec(trial, (None,) * SHARDS, ROWS),
    )
    span = Span(worker.state)
    try:
        for trial in numbers:
            worker.put(trial, 0, delays.initial(trial))
        worker.train_all(numbers[trials:])
        span.begin()
        cpu = time.process_time()
        worker.train_all(numbers[:trials])
        cpu = time.process_time() - cpu
    finally:
        worker.close()
    tasks = trials * microbatches * SHARDS * 2  # without updates, which take no time
    work = tasks * seconds
    device_seconds = devices * span.seconds
    return Figure(
        busy=work / device_seconds,
        computing=span.computing / device_seconds,
        lost=(device_seconds - work) / tasks,
        agent=cpu / tasks,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pick", choices=PICKS, default=DEFAULT_PICK, help="of the backend")
    parser.add_argument("--devices", type=int, choices=DEVICES, help="only this number of devices")
    parser.add_argument("--task", type=int, choices=MILLISECONDS, help="only these milliseconds")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    given = parser.parse_args()
    if given.quick:
        given.devices, given.task = 2, 2
    context = fork_server()
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, pick={given.pick}\n")
    print(
        "| devices | task, ms | busy | at a task | goal | lost per task, ms "
        "| agent's CPU per task, ms | load |"
    )
    print("| --- " * 8 + "|", flush=True)
    for devices, (number, task) in product(DEVICES, enumerate(MILLISECONDS)):
        if given.devices not in (None, devices) or given.task not in (None, task):
            continue
        total = QUICK_SECONDS if given.quick else SECONDS
        figure = measure(devices, task, given.pick, total, context)
        print(
            f"| {devices} | {task} | {figure.busy:.3f} | {figure.computing:.3f} "
            f"| {GOALS[devices][number]:.2f} | {1000 * figure.lost:.2f} "
            f"| {1000 * figure.agent:.2f} | {os.getloadavg()[0]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
