"""Simulates SHARP on four devices, against model parallel, task parallel and GPipe."""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.pick import Rule, oldest_first, sharp
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation

DEVICES = 4
SHARDS = 4
STEPS = 20
SLOTS = 3  # one computes, one is loaded, one is written back
TASKS = {ActionKind.F: 1.5, ActionKind.B: 1.5}  # levelled, so that promotion has one ratio
TRIALS = (4, 8, 16)
PROMOTIONS = (0.5, 1.0, 1.5)  # over the time of a task


@dataclass(frozen=True)
class Figure:
    """Holds the utilisation of one case, and the makespans of others over SHARP's."""

    trials: int
    spread: float
    promotion: float
    single: float  # utilisation without double buffering
    double: float
    over_bound: float
    model_parallel: float
    task_parallel: float
    gpipe_4: float
    gpipe_8: float
    oldest_first: float


def costs_of(trials: int, spread: float) -> list[float]:
    """Return what a task of each trial costs, over that of the cheapest."""
    return [spread ** (visit / (trials - 1)) for visit in range(trials)]


def seconds_of_trial(cost: float) -> float:
    return STEPS * SHARDS * sum(TASKS.values()) * cost


def simulate(
    costs: Sequence[float], promotion: float, double_buffering: bool = True, rule: Rule = sharp
) -> float:
    """Return the makespan of the queues.

    A promotion takes a share of the trial's own task time, and writing back as long.
    """
    specs = [
        VisitSpec(
            visit,
            TaskGraph(SHARDS, STEPS),
            (ShardSpec(1, forward=TASKS[ActionKind.F] * c, backward=TASKS[ActionKind.B] * c),)
            * SHARDS,
            fused=False,
        )
        for visit, c in enumerate(costs)
    ]

    def seconds(action: Action) -> float:
        cost = costs[action.trial]
        if action.kind in TASKS:
            return TASKS[action.kind] * cost
        moves = action.kind in (ActionKind.LOAD, ActionKind.SPILL) and action.device != HOST
        return promotion * TASKS[ActionKind.F] * cost if moves else 0.0

    simulation = WorkerSimulation(
        specs, [SLOTS] * DEVICES, None, rule, seconds, double_buffering=double_buffering
    )
    return simulation.run().makespan


def task_parallel(work: Sequence[float]) -> float:
    """Return the makespan of whole trials on devices, longest first; each must fit a device."""
    devices = [0.0] * DEVICES
    for seconds in sorted(work, reverse=True):
        heapq.heappush(devices, heapq.heappop(devices) + seconds)
    return max(devices)


def gpipe(work: Sequence[float], microbatches: int) -> float:
    """Return the makespan of one trial after the other, everything resident, updates free."""
    return sum(work) / DEVICES * (microbatches + DEVICES - 1) / microbatches


def measure(trials: int, spread: float, promotion: float) -> Figure:
    costs = costs_of(trials, spread)
    work = [seconds_of_trial(cost) for cost in costs]
    bound = max(max(work), sum(work) / DEVICES)
    single = simulate(costs, promotion, double_buffering=False)
    double = simulate(costs, promotion)
    oldest = simulate(costs, promotion, rule=oldest_first)
    return Figure(
        trials, spread, promotion,
        sum(work) / DEVICES / single, sum(work) / DEVICES / double, double / bound,
        sum(work) / double, task_parallel(work) / double,
        gpipe(work, 4) / double, gpipe(work, 8) / double, oldest / double,
    )  # fmt: skip


def table(figures: Sequence[Figure]) -> str:
    lines = [
        "| trials | costs | promotion / task | utilisation, single | **double** | makespan / bound "
        "| over model parallel | task parallel | GPipe m=4 | GPipe m=8 | oldest first |",
        "| --- " * 11 + "|",
    ]
    for f in figures:
        costs = "equal" if f.spread == 1 else f"{f.spread:g}-fold"
        lines.append(
            f"| {f.trials} | {costs} | {f.promotion:g} | {f.single:.3f} | **{f.double:.3f}** "
            f"| {f.over_bound:.3f} | {f.model_parallel:.2f} | {f.task_parallel:.2f} "
            f"| {f.gpipe_4:.2f} | {f.gpipe_8:.2f} | {f.oldest_first:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: 4 trials")
    arguments = parser.parse_args()
    figures = [
        measure(trials, spread, promotion)
        for spread in (1.0, 10.0)
        for trials in TRIALS[: 1 if arguments.quick else None]
        for promotion in PROMOTIONS
    ]
    print(table(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(f) for f in figures], indent=2) + "\n")


if __name__ == "__main__":
    main()
