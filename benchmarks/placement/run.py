"""Plans how many models train on the devices of a worker, and simulates it beside other ways."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from random import Random

from benchmarks.placement.every import every_plan, plain_plan
from benchmarks.placement.options import PlacementOptions
from benchmarks.placement.plan import (
    JointPlan,
    TrialPlacement,
    UncutTrial,
    planned_visit,
)
from benchmarks.placement.search import (
    ChosenPlan,
    chosen_plan,
    first_plan,
    seconds_of_plan,
)
from benchmarks.placement.seconds import TimelineSeconds
from benchmarks.placement.timeline import simulated
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.queues.visit_spec import ShardSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.sizing.bill import WorkerMemory

MICROBATCHES, WINDOW = 8, 4
SPREAD = 10.0  # the longest trial over the shortest one
NBYTES = 1e6  # of the state of the shortest trial, of which a microbatch takes a second
PLANNING = 8.0  # seconds of CPU after which the search ends; what it found is simulated after that
UNEVEN = 0.6  # of the logarithm of a unit's seconds and bytes
SLOPE = 4.0  # how much more a first unit computes than one in the middle, and has fewer bytes
CHANGES = 200  # for the speed of a changed timeline


def trials_of(number: int, units: tuple[int, int], uneven: bool, seed: int) -> list[UncutTrial]:
    """Return models whose first units compute much and have few bytes, as those of a CNN."""
    random, found = Random(seed), []
    for trial in range(number):
        cost = SPREAD ** (trial / max(1, number - 1))
        number_of_units = random.randint(*units)
        seconds, nbytes = [1.0] * number_of_units, [1.0] * number_of_units
        if uneven:
            places = [1 - 2 * k / (number_of_units - 1) for k in range(number_of_units)]
            seconds = [math.exp(random.gauss(0, UNEVEN)) * SLOPE**x for x in places]
            nbytes = [math.exp(random.gauss(0, UNEVEN)) / SLOPE**x for x in places]
        kept = tuple(
            ShardSpec(
                state := round(NBYTES * cost * b / sum(nbytes)),
                activations=state // 10,
                forward=cost * s / sum(seconds) / 3,
                backward=2 * cost * s / sum(seconds) / 3,
            )
            for s, b in zip(seconds, nbytes, strict=True)
        )
        again = tuple(replace(u, boundary=1000, backward=u.forward + u.backward) for u in kept)
        found.append(UncutTrial(TaskGraph(number_of_units, MICROBATCHES, WINDOW), again, kept))
    random.shuffle(found)
    return found


def worker(
    trials: Sequence[UncutTrial], devices: int, room: float, promotion: float
) -> WorkerMemory:
    """Return a worker whose devices have so much of the largest trial.

    To bring a trial takes so much of what a microbatch of it computes.
    """
    largest = max(sum(unit.state for unit in trial.kept) for trial in trials)
    rates = MoveRates(device=NBYTES / promotion)
    return WorkerMemory((int(room * largest),) * devices, None, None, devices + 1, rates)


def sharp_with_equal_cuts(trials: Sequence[UncutTrial], memory: WorkerMemory) -> JointPlan:
    """Return SHARP over the fewest shards of as many units each that fit, two at a time.

    Where a device holds a whole trial, that is one shard whose activations are kept.
    """
    return JointPlan(
        tuple(_equal(number, trial, memory) for number, trial in enumerate(trials)),
        (*range(len(trials)),),
        len(trials),
        "sharp",
    )


def _equal(number: int, trial: UncutTrial, memory: WorkerMemory) -> TrialPlacement:
    budget, units = memory.devices[0], trial.graph.shards
    assert budget is not None
    if planned_visit(number, trial, TrialPlacement()).device_need <= budget:
        return TrialPlacement()
    for shards in range(2, units + 1):
        placed = TrialPlacement(tuple(units * k // shards for k in range(1, shards)), True)
        if planned_visit(number, trial, placed).buffered_need(2) <= budget:
            return placed
    raise SystemExit(f"a unit of trial {number} does not fit; give the devices more room")


@dataclass(frozen=True)
class Figure:
    """Holds the makespans of one case, and what planning it took."""

    trials: int
    devices: int
    uneven: bool
    room: float
    promotion: float
    bound: float
    sharp: float
    plain: float
    chosen: float
    pipelined: int  # trials
    planning: float  # seconds of CPU
    coarse_steps: int
    queue_steps: int
    simulated: float
    faster: float  # how many times as fast a changed timeline is as a whole one


def measure(
    devices: int,
    uneven: bool,
    room: float,
    promotion: float,
    trials: Sequence[UncutTrial],
    cpu: float,
) -> Figure:
    memory = worker(trials, devices, room, promotion)
    work = [MICROBATCHES * sum(u.forward + u.backward for u in trial.kept) for trial in trials]
    sharp = seconds_of_plan(sharp_with_equal_cuts(trials, memory), trials, memory)
    begun = time.process_time()
    found = chosen_plan(trials, memory, 0, clock(cpu))
    planning = time.process_time() - begun
    return Figure(
        len(trials), devices, uneven, room, promotion, sum(work) / devices, sharp,
        found.plain_seconds, found.seconds,
        sum(len(placed.devices) > 1 for placed in found.plan.placements), planning,
        found.coarse_steps, found.queue_steps, found.simulated, faster(trials, memory),
    )  # fmt: skip


def clock(cpu: float) -> Callable[[], float]:
    """Return which share of so many seconds of CPU is over."""
    begun = time.process_time()
    return lambda: min(1.0, (time.process_time() - begun) / cpu)


def faster(trials: Sequence[UncutTrial], memory: WorkerMemory) -> float:
    """Return the time of whole coarse timelines over that of changed ones, for random changes."""
    options, random = PlacementOptions(trials, memory), Random(0)
    plan = first_plan(options)
    seconds = TimelineSeconds(options, plan.placements, plan.order)
    whole = changed = 0.0
    drawn = (options.change(plan.placements, range(len(trials)), random) for _ in count())
    for change in islice(filter(None, drawn), CHANGES):
        begun = time.process_time()
        seconds.change(change)
        between = time.process_time()
        simulated(seconds.timeline.tasks)
        whole += time.process_time() - between
        changed += between - begun
        seconds.undo()
    return whole / changed


@dataclass(frozen=True)
class Enumerated:
    """Holds the makespans of all plans of a small instance, over that of the best."""

    plans: int
    worst: float
    plain: float
    sharp: float
    chosen: float


def enumerate_all(seed: int, units: int, cpu: float) -> Enumerated:
    """Try all plans of two models on two devices, and search among them, too."""
    trials = [replace(each, recomputed=()) for each in trials_of(2, (units, units), True, seed)]
    memory = worker(trials, 2, room=1.2, promotion=0.5)
    seconds = [seconds_of_plan(plan, trials, memory) for plan in every_plan(trials, memory)]
    possible = [each for each in seconds if each < math.inf]
    best = min(possible)
    sharp = replace(plain_plan(trials, memory), pick="sharp")
    chosen: ChosenPlan = chosen_plan(trials, memory, seed, clock(cpu))
    return Enumerated(
        len(possible), max(possible) / best, chosen.plain_seconds / best,
        seconds_of_plan(sharp, trials, memory) / best, chosen.seconds / best,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few trials")
    arguments = parser.parse_args()
    quick = arguments.quick
    number, devices, cpu = (6, 2, 0.5) if quick else (32, 8, PLANNING)
    print(
        "| stages | device / largest model | promotion / microbatch | makespan / bound | **SHARP, "
        "equal cuts, over ours** | no plan over ours | trials pipelined | planned in | steps: "
        "coarse | queues | of the visits simulated | coarse, changed: faster by |"
    )
    print("| --- " * 12 + "|", flush=True)
    figures = []
    for uneven, room, promotion in [(True, 0.9, 0.5)] if quick else CASES:
        trials = trials_of(number, (6, 8) if quick else (16, 32), uneven, seed=0)
        f = measure(devices, uneven, room, promotion, trials, cpu)
        figures.append(f)
        print(
            f"| {'uneven' if uneven else 'even'} | {room:g} | {promotion:g} "
            f"| {f.chosen / f.bound:.3f} | **{f.sharp / f.chosen:.2f}** "
            f"| {f.plain / f.chosen:.2f} | {f.pipelined} | {f.planning:.1f} s | {f.coarse_steps} "
            f"| {f.queue_steps} | {f.simulated:.2f} | {f.faster:.1f} |",
            flush=True,
        )
    print("\n| instance | plans | worst / best | no plan | SHARP | **chosen** |")
    print("| --- " * 6 + "|", flush=True)
    small = []
    for seed in range(1 if quick else INSTANCES):
        each = enumerate_all(seed, units=2 if quick else 3, cpu=cpu / 5)
        small.append(each)
        print(
            f"| {seed} | {each.plans} | {each.worst:.2f} | {each.plain:.3f} | {each.sharp:.3f} "
            f"| **{each.chosen:.3f}** |",
            flush=True,
        )
    if arguments.json is not None:
        found = {"cases": [*map(asdict, figures)], "instances": [*map(asdict, small)]}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


CASES = [
    (True, 1.2, 0.25), (True, 1.2, 0.5), (True, 1.2, 1.0), (True, 0.9, 0.25), (True, 0.9, 0.5),
    (True, 0.9, 1.0), (False, 0.9, 0.5),
]  # fmt: skip
INSTANCES = 6

if __name__ == "__main__":
    main()
