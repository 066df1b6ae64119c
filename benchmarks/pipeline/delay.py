"""Measures schedules of a pipeline on delay devices, in the real queues, against theory."""

from __future__ import annotations

import argparse
import os
import platform
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.gap.run import Span
from cerebro_hydra.agent.device.messages import VisitOrder
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings, fork_server
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.visit_spec import ShardSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.pick import DEFAULT_PICK, PICKS
from cerebro_hydra.plan.schedules.registry import with_versions
from cerebro_hydra.shards.admission.task_profile import TaskProfile
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.graph_passes import PassRecord
from cerebro_hydra.shards.engine.layout import Bytes, ShardBytes
from cerebro_hydra.testing.queue_worker import DelayRun, DelaySpec, DelayTrials, QueueWorker, train

DEVICES = (4, 8)
FORWARD = 0.06  # seconds of a device for a microbatch; a backward takes twice as long
NBYTES, ROWS, WINDOWS = 4096, 4, 3
RANGES = 2  # of shards on each device, by "interleaved"


class MovingDelays(DelayRun):
    """Waits for tasks of microbatches that move, and leaves nothing of them."""

    def take_up(self, tasks: Any, slab: Bytes, record: PassRecord) -> None:
        """Begin a unit."""

    def put_down(self) -> PassRecord:
        """End a unit."""
        return PassRecord(rows=self._rows)


@dataclass(frozen=True)
class PipelinedDelays(DelayTrials):
    """Opens visits whose microbatches move."""

    def profile(self, trial: Any) -> TrialProfile:
        """Describe a trial as admission does, which measures its tasks."""
        seconds = self.forward[trial.trial]
        needs = (ShardSpec(0, 0, 0, seconds, self.backward * seconds, 0.0),) * self.shards
        tasks = TaskProfile(needs, needs, None, (), 0, (8,) * self.shards)
        each = ShardBytes(0, self.nbytes[trial.trial], 0, False)
        return TrialProfile((each,) * self.shards, (), False, tasks)

    def open(self, order: VisitOrder) -> DelayRun:
        """Return a visit of a trial."""
        forward = self.forward[order.task.trial]
        seconds = {ActionKind.F: forward, ActionKind.B: self.backward * forward}

        def spent(task: Action) -> float:
            return seconds.get(task.kind, 0.0)

        return MovingDelays(order, spent, self.rows)


def measure(schedule: str, devices: int, forward: float, context: Any) -> tuple[float, float]:
    """Return the seconds of a sub-epoch of some windows, and what theory says of them."""
    ranges = RANGES if schedule == "interleaved" else 1
    shards, window = devices * ranges, 1 if schedule == "pipedream" else 2 * devices
    microbatches = WINDOWS * 2 * devices
    graph = with_versions(TaskGraph(shards, microbatches, window), schedule, devices)
    delays = PipelinedDelays(shards, {0: NBYTES}, {0: forward / ranges}, 2.0, ROWS)
    spec = DelaySpec(0, (None,) * shards, ROWS, window, False, schedule, graph.staleness)
    settings = DeviceSettings(context, delays)

    def start(slabs: Slabs, on_answer: Any, on_gone: Any) -> DeviceProcess:
        return DeviceProcess(settings, slabs, print, on_answer, on_gone)

    state = WorkerState([None] * devices, None, PICKS[DEFAULT_PICK])
    span = Span(state)
    worker = QueueWorker(start, state, None, ROWS * microbatches, lambda trial: spec)
    try:
        worker.put(0, 0, delays.initial(0))
        for number in range(2):  # devices start in the first sub-epoch
            span.begin()
            worker.perform(train(number, 0, number + 1))
            result = worker.result()
            if not isinstance(result, events.SubEpochDone):
                raise RuntimeError(f"the trial was not trained: {result}")
    finally:
        worker.close()
    step = 3 * forward
    if schedule in ("pipedream", "2bw"):
        return span.seconds, step * (microbatches + devices - 1)
    return span.seconds, WINDOWS * step * (window + (devices - 1) / ranges)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    given = parser.parse_args()
    context = fork_server()
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}\n"
    )
    print("| schedule | devices | measured, s | theory, s | measured / theory |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    for devices in (2,) if given.quick else DEVICES:
        for schedule in ("gpipe", "1f1b", "interleaved", "pipedream", "2bw"):
            forward = 0.01 if given.quick else FORWARD
            seconds, theory = measure(schedule, devices, forward, context)
            cells = f"{seconds:.2f} | {theory:.2f} | {seconds / theory:.3f}"
            print(f"| {schedule} | {devices} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
