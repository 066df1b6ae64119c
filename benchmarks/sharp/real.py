"""Measures SHARP in real queues on four delay devices, against fixed schedules on the same devices.

Processes, messages, queues and memory are those of an agent; a task or a promotion is a wait.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import queue
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.queue_worker import (
    DelayMemory,
    DelaySpec,
    DelayTrials,
    QueueWorker,
    train,
)
from cerebro_hydra.agent.attempts import VisitPlanner
from cerebro_hydra.agent.device.messages import (
    Alive,
    Answer,
    Close,
    Compute,
    Computed,
    Done,
    Move,
    Open,
    Opened,
    Ready,
    VisitOrder,
)
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings, fork_server
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.pick import sharp
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U

DEVICES = 4
SHARDS = 4
MICROBATCHES = 8
WINDOW = 8  # microbatches of an optimizer step
SLOTS = 3  # one computes, one is loaded, one is written back
NBYTES = 1 << 18  # of the shards of the cheapest trial
ROWS = 4  # of a microbatch
TASK = {1.0: 0.25, 10.0: 0.06}  # seconds of a task of the cheapest trial, by the spread of costs
QUICK_TASK = 0.01
TRIALS = (4, 8, 16)
PROMOTIONS = (0.5, 1.0, 1.5)  # over the time of a task
PATIENCE = 60.0  # seconds after which a device counts as one that hangs
WARM_UP = 0.002  # seconds of a task of the trials that start the devices

Lists = Mapping[int, Sequence[Action]]  # what each device does, in this order


@dataclass(frozen=True)
class Case:
    """Names trials whose costs lie between 1 and `spread`, in equal ratios.

    `task` is the seconds of a task of the cheapest one.
    """

    trials: int
    spread: float
    task: float

    @property
    def costs(self) -> list[float]:
        return [self.spread ** (trial / (self.trials - 1)) for trial in range(self.trials)]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of a task of each trial."""
        return [self.task * cost for cost in self.costs]

    @property
    def work(self) -> list[float]:
        return [MICROBATCHES * SHARDS * 2 * seconds for seconds in self.seconds]

    def delays(self) -> DelayTrials:
        """Return the trials, and one more for each device, which only starts it."""
        warm = [WARM_UP] * DEVICES
        nbytes = [int(NBYTES * cost) for cost in self.costs] + [NBYTES] * DEVICES
        seconds = dict(enumerate([*self.seconds, *warm]))
        return DelayTrials(SHARDS, dict(enumerate(nbytes)), seconds, backward=1.0, rows=ROWS)


@dataclass(frozen=True)
class Baselines:
    """Holds the makespans of fixed schedules."""

    model_parallel: float
    task_parallel: float
    gpipe_4: float
    gpipe_8: float


@dataclass(frozen=True)
class Figure:
    """Holds what was measured of one case, and SHARP's makespan as it was simulated."""

    case: Case
    promotion: float
    double_buffering: bool
    measured: float
    simulated: float
    load: float  # of the machine, when it ended

    @property
    def utilisation(self) -> float:
        return sum(self.case.work) / DEVICES / self.measured

    @property
    def deviation(self) -> float:
        """Return how much longer the real run took than the simulated one."""
        return self.measured / self.simulated - 1


# ---------------------------------------------------------------------- SHARP


def measure(case: Case, promotion: float, double_buffering: bool, context: Any) -> Figure:
    """Train every trial for a sub-epoch in the queues of a worker, and simulate the same."""
    delays = case.delays()
    make_memory = partial(DelayMemory, rate_of(case, promotion))
    settings = DeviceSettings(context, delays, double_buffering, make_memory)
    budgets = budgets_of(case)

    def start(slabs: Slabs, on_answer: Any, on_gone: Any) -> DeviceProcess:
        return DeviceProcess(settings, slabs, print, on_answer, on_gone)

    worker = QueueWorker(
        start,
        WorkerState(budgets, None, sharp, double_buffering=double_buffering),
        budgets[0],
        rows=MICROBATCHES * ROWS,
        spec_of=spec_of,
    )
    try:
        for trial in range(case.trials + DEVICES):
            worker.put(trial, 0, delays.initial(trial))
        worker.train_all(range(case.trials, case.trials + DEVICES))
        measured = worker.train_all(range(case.trials))
    finally:
        worker.close()
    simulated = simulate(case, promotion, double_buffering)
    return Figure(case, promotion, double_buffering, measured, simulated, os.getloadavg()[0])


def simulate(case: Case, promotion: float, double_buffering: bool) -> float:
    """Return the seconds until the last shard was written back."""
    delays, budgets = case.delays(), budgets_of(case)
    rates = MoveRates(device=rate_of(case, promotion))
    resources = WorkerResources(device_memory=budgets[0], residents=2)
    planner = VisitPlanner(lambda split, partition: MICROBATCHES * ROWS, resources)
    specs = []
    for trial in range(case.trials):
        spec: Any = spec_of(trial)
        planner.learn(spec)
        specs.append(planner.visit_spec(trial, train(trial, trial, 1), delays.profile(spec)))

    def seconds(action: Action) -> float:
        if action.kind.computes:
            return 0.0 if action.kind is U else case.seconds[action.trial]
        return rates.seconds(action, specs[action.trial].shards[action.shard])

    simulation = WorkerSimulation(
        specs, budgets, None, sharp, seconds, double_buffering=double_buffering
    )
    return max(each.end for each in simulation.run().done)


def rate_of(case: Case, promotion: float) -> float:
    """Return the bytes per second at which a promotion takes this share of a task."""
    return NBYTES / (promotion * case.task)


def budgets_of(case: Case) -> list[int]:
    return [SLOTS * max(case.delays().nbytes.values())] * DEVICES


def spec_of(trial: int) -> DelaySpec:
    """Say of a trial what queues and delays need to know."""
    return DelaySpec(trial, (None,) * SHARDS, ROWS, WINDOW)


# ---------------------------------------------------------------------- fixed schedules


def model_parallel(trials: int) -> tuple[Lists, int]:
    """Return one trial after the other; one shard is at work at a time."""
    return {
        shard: [
            action
            for trial in range(trials)
            for microbatch in range(MICROBATCHES)
            for action in _pass(trial, shard, microbatch)
        ]
        for shard in range(SHARDS)
    }, WINDOW


def task_parallel(case: Case) -> tuple[Lists, int]:
    """Return whole trials on devices, longest first."""
    places = [(0.0, device) for device in range(DEVICES)]
    lists: dict[int, list[Action]] = {device: [] for device in range(DEVICES)}
    for trial in sorted(range(case.trials), key=lambda trial: -case.work[trial]):
        busy, device = heapq.heappop(places)
        heapq.heappush(places, (busy + case.work[trial], device))
        graph = TaskGraph(SHARDS, MICROBATCHES, WINDOW)
        for window in range(graph.windows):
            lists[device] += graph.tasks(trial, window)
    return lists, WINDOW


def gpipe(trials: int, window: int) -> tuple[Lists, int]:
    """Return one trial after the other over all devices, with `window` microbatches under way."""
    lists: dict[int, list[Action]] = {shard: [] for shard in range(SHARDS)}
    for trial in range(trials):
        for first in range(0, MICROBATCHES, window):
            numbers = range(first, first + window)
            for shard, actions in lists.items():
                actions += [Action(trial, shard, F, number) for number in numbers]
                actions += [Action(trial, shard, B, number) for number in numbers]
                actions.append(Action(trial, shard, U, numbers[-1]))
    return lists, window


def _pass(trial: int, shard: int, microbatch: int) -> Iterator[Action]:
    yield Action(trial, shard, F, microbatch)
    yield Action(trial, shard, B, microbatch)
    if microbatch % WINDOW == WINDOW - 1:
        yield Action(trial, shard, U, microbatch)


class FixedDevices:
    """Four devices that do lists of tasks; the shards lie on them before the clock begins."""

    def __init__(self, case: Case, context: Any) -> None:
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._slabs = Slabs()
        self._delays = case.delays()
        settings = DeviceSettings(context, self._delays)
        self._devices = [
            DeviceProcess(settings, self._slabs, print, self._take, self._gone)
            for _ in range(DEVICES)
        ]
        for _ in self._devices:
            self._hear(Ready)

    def close(self) -> None:
        for device in self._devices:
            device.close()

    def run(self, lists: Lists, window: int) -> float:
        """Do the lists and return the seconds that it took."""
        for device, actions in lists.items():
            self._load(self._devices[device], actions)
        graph = TaskGraph(SHARDS, MICROBATCHES, window)
        left = {device: deque(actions) for device, actions in lists.items()}
        given: dict[Action, int] = {}
        done: set[Action] = set()
        begun = time.monotonic()
        while any(left.values()) or len(given) > len(done):
            for device, actions in left.items():
                while actions and all(
                    need in done or given.get(need) == device for need, _ in graph.needs(actions[0])
                ):
                    action = actions.popleft()
                    given[action] = device
                    self._devices[device].give(Compute((action,)))
            done.update(task.action for task in self._hear(Computed).tasks)
        seconds = time.monotonic() - begun
        for device, actions in lists.items():
            for trial, shard in {(action.trial, action.shard) for action in actions}:
                self._devices[device].give(Move(Action(trial, shard, ActionKind.DROP), {}))
            for trial in {action.trial for action in actions}:
                self._devices[device].give(Close(trial, cancelled=True))
        return seconds

    def _load(self, device: DeviceProcess, actions: Sequence[Action]) -> None:
        for trial in {action.trial for action in actions}:
            spec: Any = None
            device.give(Open(VisitOrder(trial, spec, train(trial, trial, 1), 0, recompute=False)))
            self._hear(Opened)
        for trial, shard in {(action.trial, action.shard) for action in actions}:
            segment = self._slabs.allocate(self._delays.nbytes[trial])
            device.give(Move(Action(trial, shard, ActionKind.LOAD), {"trainable": segment}))
            self._hear(Done)

    def _take(self, device: object, answer: Answer) -> None:
        if not isinstance(answer, Alive):
            self._answers.put(answer)

    def _gone(self, device: object) -> None:
        """Take no notice; they are ended here."""

    def _hear(self, kind: type[Any]) -> Any:
        answer = self._answers.get(timeout=PATIENCE)
        if not isinstance(answer, kind):
            raise RuntimeError(f"a device said {answer} instead of {kind.__name__}")
        return answer


def measure_baselines(case: Case, context: Any) -> Baselines:
    devices = FixedDevices(case, context)
    try:
        return Baselines(
            devices.run(*model_parallel(case.trials)),
            devices.run(*task_parallel(case)),
            devices.run(*gpipe(case.trials, 4)),
            devices.run(*gpipe(case.trials, 8)),
        )
    finally:
        devices.close()


# ---------------------------------------------------------------------- figures


def row(figure: Figure, base: Baselines) -> str:
    case = figure.case
    costs = "equal" if case.spread == 1 else f"{case.spread:g}-fold"
    ours = figure.measured
    bound = max(max(case.work), sum(case.work) / DEVICES)
    cells = [
        f"{case.trials}", costs, f"{figure.promotion:g}",
        "double" if figure.double_buffering else "single",
        f"**{figure.utilisation:.3f}**", f"{ours / bound:.3f}", f"{100 * figure.deviation:+.1f} %",
        *(f"{seconds / ours:.2f}" for seconds in asdict(base).values()), f"{figure.load:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--trials", type=int, choices=TRIALS, help="only this number of trials")
    parser.add_argument("--spread", type=float, choices=TASK, help="only this spread of costs")
    parser.add_argument("--promotion", type=float, choices=PROMOTIONS, help="only this ratio")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: short tasks")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.trials, arguments.spread, arguments.promotion = 4, 1.0, 1.0
    context = fork_server()
    print(
        "| trials | costs | promotion / task | buffers | utilisation | makespan / bound "
        "| than simulated | over model parallel | task parallel | GPipe m=4 | GPipe m=8 | load |"
    )
    print("| --- " * 12 + "|", flush=True)
    document = []
    for spread, trials in product(TASK, TRIALS):
        if arguments.spread not in (None, spread) or arguments.trials not in (None, trials):
            continue
        case = Case(trials, spread, QUICK_TASK if arguments.quick else TASK[spread])
        base = measure_baselines(case, context)
        for promotion, double in product(PROMOTIONS, (False, True)):
            if arguments.promotion in (None, promotion):
                figure = measure(case, promotion, double, context)
                document.append({**asdict(figure), **asdict(base)})
                print(row(figure, base), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
