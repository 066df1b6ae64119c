"""Measures schedules of a pipeline on delay devices, in the real queues, against theory."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmarks.gap.run import Span
from benchmarks.queue_worker import DelayRun, DelaySpec, DelayTrials, QueueWorker, train
from cerebro_hydra.agent.device.messages import VisitOrder
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings, fork_server
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import ActionDone, WorkerEvent
from cerebro_hydra.plan.queues.events import Answer as Decision
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK, PICKS
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import with_versions
from cerebro_hydra.plan.schedules.validate import versions_held
from cerebro_hydra.plan.simulate.worker import WorkerSimulation
from cerebro_hydra.plan.sizing import stages as formulas
from cerebro_hydra.shards.admission.trial_profile import TaskProfile, TrialProfile
from cerebro_hydra.shards.engine.graph_passes import PassRecord
from cerebro_hydra.shards.engine.layout import Bytes, ShardBytes

DEVICES = (4, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "pipedream", "2bw")
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


class Heard(Span):
    """Notes of every task on which device it was, when the queues heard that it had ended, and
    what it had taken."""

    def begin(self) -> None:
        super().begin()
        self.tasks_heard: list[tuple[Action, float, float]] = []

    def _timed(self, events: Iterable[WorkerEvent]) -> list[Decision]:
        now, events = time.monotonic(), list(events)
        for event in events:
            if isinstance(event, ActionDone) and event.action.kind.computes:
                self.tasks_heard.append((event.action, now, event.seconds))
        return super()._timed(events)

    def hand_over(self, graph: TaskGraph) -> float:
        """Return the median seconds between two tasks on two devices of which one waits.

        They are of tasks whose device had ended all before it when the other one ended.
        """
        ended: dict[Action, tuple[float, int | None]] = {}
        last: dict[int | None, float] = defaultdict(float)
        waits = []
        for action, now, seconds in self.tasks_heard:
            task = Action(action.trial, action.shard, action.kind, action.microbatch)
            needs = [ended[need] for need, _ in graph.needs(task) if need in ended]
            elsewhere = [when for when, device in needs if device != action.device]
            if elsewhere and max(elsewhere) > last[action.device]:
                waits.append(now - seconds - max(elsewhere))
            ended[task] = now, action.device
            last[action.device] = now
        return statistics.median(waits)

    def kept(self, graph: TaskGraph, devices: int) -> tuple[list[int], list[int]]:
        """Return by device the most parts of microbatches that were between forward and backward
        at once, and the most versions of weights of one of its shards.
        """
        signs = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.U: 0}
        done = [action for action, *_ in self.tasks_heard]
        opened, versions = [], versions_held(done, graph)
        for device in range(devices):
            own = [action for action in done if action.device == device]
            opened.append(max(accumulate(signs[action.kind] for action in own)))
        shards = [{a.shard for a in done if a.device == device} for device in range(devices)]
        return opened, [max(versions[k] for k in each) for each in shards]

    def task_seconds(self) -> dict[tuple[ActionKind, int], float]:
        """Return the median seconds of each kind of task of each shard."""
        found: defaultdict[tuple[ActionKind, int], list[float]] = defaultdict(list)
        for action, _, seconds in self.tasks_heard:
            found[action.kind, action.shard].append(seconds)
        return {task: statistics.median(each) for task, each in found.items()}

    def explained(self, spec: VisitSpec, devices: int) -> list[float]:
        """Return the seconds of the same tasks, with what they took, on a virtual clock.

        The first is without what a hand-over takes, the second with it.
        """
        took, rule = self.task_seconds(), PICKS[DEFAULT_PICK]

        def seconds(action: Action) -> float:
            return took[action.kind, action.shard] if action.kind.computes else 0.0

        return [
            WorkerSimulation([spec], [None] * devices, None, rule, seconds, hand_over=each)
            .run()
            .makespan
            for each in (0.0, self.hand_over(spec.graph))
        ]


@dataclass(frozen=True)
class Figures:
    """Holds what was measured of a schedule, and what theory says.

    Args:
        seconds: of a sub-epoch.
        theory: the seconds of its tasks and of the bubble.
        tasks: what those would be if tasks took what they took.
        explained: the same, with what hand-overs took.
        hand_over: seconds of one.
        opened, versions: see `Heard.kept`.
    """

    seconds: float
    theory: float
    tasks: float
    explained: float
    hand_over: float
    opened: list[int]
    versions: list[int]

    @property
    def cells(self) -> list[str]:
        """Return what is printed."""
        return [
            f"{self.seconds:.2f}",
            f"{self.theory:.2f}",
            f"{self.seconds / self.theory:.3f}",
            f"{self.tasks / self.theory:.3f}",
            f"{self.explained / self.theory:.3f}",
            f"{1e3 * self.hand_over:.2f}",
            " ".join(map(str, self.opened)),
            " ".join(map(str, self.versions)),
        ]


def by_formula(schedule: str, devices: int, graph: TaskGraph) -> tuple[list[int], list[int]]:
    """Return what `Heard.kept` is by docs/schedules.md."""
    places, m, n = range(devices), graph.window, graph.microbatches
    if schedule == "interleaved":
        size = m // (m // devices)
        opened = [(RANGES - 1) * size + 2 * (devices - 1 - s) + 1 for s in places]
        return [min(each, RANGES * m) for each in opened], [1] * devices
    return (
        [formulas.stashes_held(schedule, s, devices, m, n) for s in places],
        [formulas.versions_held(schedule, s, devices, graph.windows) for s in places],
    )


def measure(schedule: str, devices: int, forward: float, context: Any) -> Figures:
    """Measure a sub-epoch of some windows.

    Raises:
        RuntimeError: the trial was not trained, or devices kept other than the formulas say.
    """
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
    span = Heard(state)
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
    theory = WINDOWS * step * (window + (devices - 1) / ranges)
    if schedule in ("pipedream", "2bw"):
        theory = step * (microbatches + devices - 1)
    shards_of = (ShardSpec(1, forward=forward / ranges, backward=2 * forward / ranges),) * shards
    visit = VisitSpec(0, graph, shards_of, recompute=False, schedule=schedule, devices=devices)
    kept = span.kept(graph, devices)
    if kept != (formula := by_formula(schedule, devices, graph)):
        raise RuntimeError(f"devices kept {kept} by {schedule}, and by the formulas {formula}")
    tasks, explained = span.explained(visit, devices)
    return Figures(span.seconds, theory, tasks, explained, span.hand_over(graph), *kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--devices", type=int, help="only with so many devices")
    parser.add_argument("--schedule", choices=SCHEDULES, help="only this schedule")
    given = parser.parse_args()
    context = fork_server()
    print(
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}\n"
    )
    titles = (
        "schedule", "devices", "measured, s", "theory, s", "measured / theory",
        "tasks as they were", "and hand-overs", "a hand-over, ms", "open", "versions",
    )  # fmt: skip
    print(f"| {' | '.join(titles)} |")
    print("| --- " * len(titles) + "|", flush=True)
    numbers = (given.devices,) if given.devices else (2,) if given.quick else DEVICES
    for devices in numbers:
        for schedule in (given.schedule,) if given.schedule else SCHEDULES:
            forward = 0.01 if given.quick else FORWARD
            cells = measure(schedule, devices, forward, context).cells
            print(f"| {schedule} | {devices} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
