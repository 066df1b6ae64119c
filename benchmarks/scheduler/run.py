"""Measures what a decision costs, and how good decisions are, at any number of workers and trials.

The real state machine and its policy run in the simulator; nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from benchmarks.scheduler.bound import lower_bound
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import Event
from cerebro_hydra.plan.policy.policy import Decision, Scheduler
from cerebro_hydra.plan.simulate.run import Simulation, TaskSeconds, WorkerCrash
from tests.plan.closed_search import ClosedSearch

EPOCHS = 2
SPREAD = 0.3  # of the trials' costs, as the sigma of a lognormal; of the workers' paces a third
NOISE = 0.05  # how far a task may be from cost times pace
EVALUATION = 0.3  # of a sub-epoch's time
LOST = 0.03  # of the workers
EVENTS_PER_SUB_EPOCH = 3  # that it is ending, that it is done, that its state was received


@dataclass(frozen=True)
class Figures:
    """Holds what one run cost; milliseconds are processor time of one thread, per event."""

    workers: int
    trials: int
    events: int
    finished: bool
    mean_ms: float
    median_ms: float
    p99_ms: float
    max_ms: float
    makespan_over_bound: float | None
    busy_share: float
    memory_gib: float


class TimedScheduler(Scheduler):
    """Notes the processor time of every event, with what is assigned because of it."""

    def __init__(self, config: HopConfig) -> None:
        super().__init__(config)
        self.milliseconds = array("d")

    def handle(self, event: Event) -> list[Decision]:
        """Handle one event."""
        begun = time.thread_time()
        decisions = super().handle(event)
        self.milliseconds.append((time.thread_time() - begun) * 1000)
        return decisions


def task_seconds(workers: int, trials: int) -> tuple[list[float], TaskSeconds]:
    """Return the trials' relative costs, and how long each task takes, which no one is told."""
    random = Random(0)
    cost = [random.lognormvariate(0, SPREAD) for _ in range(trials)]
    pace = [random.lognormvariate(0, SPREAD / 3) for _ in range(workers)]

    def seconds(kind: TaskKind, trial: int, partition: int) -> float:
        share = 1.0 if kind == "train" else EVALUATION
        mixed = (trial * 2654435761 + partition * 2246822519 + (kind == "train")) % 1_000_003
        noise = 1 + NOISE * (2 * mixed / 1_000_003 - 1)
        return cost[trial] * pace[partition] * noise * share

    return cost, seconds


def crashes(workers: int, trials: int, events: int | None) -> list[WorkerCrash]:
    """Return 3 % of the workers, at least one, lost in the part of the run that is simulated."""
    random = Random(1)
    sub_epochs = EPOCHS * trials * workers
    if events is not None:
        sub_epochs = min(sub_epochs, events // EVENTS_PER_SUB_EPOCH)
    lost = random.sample(range(workers), max(1, round(LOST * workers)))
    seconds = sub_epochs / workers
    return [WorkerCrash(random.uniform(0.1, 0.9) * seconds, worker, 2.0) for worker in lost]


def measure(workers: int, trials: int, events: int | None) -> Figures:
    """Run to the end, or for this many events."""
    cost, seconds = task_seconds(workers, trials)
    search = ClosedSearch(
        HopConfig(partitions=workers),
        tuple(TrialConfig(t, cost[t], 10**8, (("frozen", f"t{t}"),)) for t in range(trials)),
        EPOCHS,
    )
    slots = [(worker,) for worker in range(workers)]
    busy = 0.0

    def work(kind: TaskKind, trial: int, partition: int) -> float:
        nonlocal busy
        busy += seconds(kind, trial, partition)
        return seconds(kind, trial, partition)

    simulation = Simulation(
        search,
        slots,
        work,
        crashes=crashes(workers, trials, events),
        on_decision=lambda event, instructions: None,
    )
    simulation.scheduler = scheduler = TimedScheduler(search.config)
    spent, state = scheduler.milliseconds, scheduler.state
    while not state.finished and (events is None or len(spent) < events):
        simulation.step()
    ordered = sorted(spent)
    return Figures(
        workers=workers,
        trials=trials,
        events=len(ordered),
        finished=state.finished,
        mean_ms=sum(ordered) / len(ordered),
        median_ms=ordered[len(ordered) // 2],
        p99_ms=ordered[len(ordered) * 99 // 100],
        max_ms=ordered[-1],
        makespan_over_bound=simulation.now / lower_bound(search, slots, seconds)
        if state.finished
        else None,
        busy_share=busy / workers / simulation.now,
        memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


def main() -> None:
    """Measure one size and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=10)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--events", type=int, help="stop after this many events")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: 5 x 20")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.trials = 5, 20
    figures = asdict(measure(arguments.workers, arguments.trials, arguments.events))
    for name, value in figures.items():
        print(f"{name:>20}  {value:.4g}" if isinstance(value, float) else f"{name:>20}  {value}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
