"""Measures what a decision of a worker's queues costs, by visits and devices."""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Iterable
from random import Random

from cerebro_hydra.plan.messages.actions import HOST, Action
from cerebro_hydra.plan.queues.events import Answer, WorkerEvent
from cerebro_hydra.plan.queues.pick import PICKS
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation

SIZES = ((9, 8), (100, 64), (1000, 8), (1000, 64))
SHARDS, MICROBATCHES = 4, 50
STATE, BUDGET, PROMOTION = 1000, 3000, 0.3
MOMENTS = 2000
PICK = "sharp"


def seconds_of_decisions(visits: int, devices: int, moments: int) -> list[float]:
    """Return the CPU seconds of the first moments of a simulated worker, in their order."""
    random = Random(0)
    specs = []
    for number in range(visits):
        cost = random.lognormvariate(0, 0.3)
        shard = ShardSpec(STATE, forward=cost, backward=2 * cost, update=0.1 * cost)
        graph = TaskGraph(SHARDS, MICROBATCHES)
        specs.append(VisitSpec(number, graph, (shard,) * SHARDS, unit_seconds=0.0))

    def seconds(action: Action) -> float:
        if action.kind.computes:
            return specs[action.trial].shards[action.shard].seconds(action.kind)
        return 0.0 if action.device in (None, HOST) else PROMOTION

    simulation = WorkerSimulation(specs, [BUDGET] * devices, None, PICKS[PICK], seconds)
    handle, taken = simulation.state.handle, list[float]()

    def timed(events: Iterable[WorkerEvent]) -> list[Answer]:
        begun = time.thread_time()
        answers = handle(events)
        taken.append(time.thread_time() - begun)
        return answers

    simulation.state.handle = timed  # type: ignore[method-assign]
    while len(taken) < moments and simulation.next_moment < float("inf"):
        simulation.step()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs: 9 x 8")
    given = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, one core\n")
    print("| visits x devices | first moment, ms | median, ms | 99th percentile, ms |")
    print("| --- | --- | --- | --- |", flush=True)
    for visits, devices in SIZES[:1] if given.quick else SIZES:
        first, *rest = seconds_of_decisions(visits, devices, 200 if given.quick else MOMENTS)
        *_, late = statistics.quantiles(rest, n=100)
        cells = (f"{1000 * each:.3f}" for each in (first, statistics.median(rest), late))
        print(f"| {visits} x {devices} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
