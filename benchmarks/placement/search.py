"""Finds how the trials of a worker should train together, in as much time as there is.

`chosen_plan` is a Metropolis search (Jia et al., "Beyond Data and Model Parallelism for Deep Neural
Networks", MLSys 2019, section 6): a random change of one trial, or of two, is kept if all end
earlier, else with a probability that falls with what it costs. In the first half of the time the
end is that of a timeline of coarse tasks, in the second half that of the queues of a worker
themselves, for a change of those trials which take longest (``benchmarks/placement/seconds.py``).
It begins with each trial on the device that is busy least, the longest trial first. What comes out
is never worse than that, or than no plan at all, as far as simulations tell.

Few plans are all tried instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.placement.every import are_few, every_plan, plain_plan
from benchmarks.placement.options import PlacementOptions
from benchmarks.placement.plan import (
    JointPlan,
    TrialPlacement,
    UncutTrial,
    seconds_of,
    simulated_plan,
)
from benchmarks.placement.seconds import QueueSeconds, TimelineSeconds
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK, PICKS
from cerebro_hydra.plan.sizing.bill import WorkerMemory

FEW_PLACEMENTS = 64
"""So many placements of all trials at most are all tried, with each pick."""

WARMTH = 0.02
"""What costs this share of all seconds is kept in one of e cases."""

COARSE = 0.5
"""The share of the time in which coarse tasks are asked."""


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """Tells which plan was chosen and what is expected of it, as the queues were simulated.

    Args:
        seconds: that it takes.
        plain_seconds: that the plain plan takes.
        coarse_steps: how many changes coarse tasks were asked of, and `queue_steps` the queues.
        looked_at: which share of the coarse tasks the steps looked at.
        simulated: which share of the visits the queues had to simulate again.
    """

    plan: JointPlan
    seconds: float
    plain_seconds: float
    coarse_steps: int = 0
    queue_steps: int = 0
    looked_at: float = 0.0
    simulated: float = 0.0


def chosen_plan(
    trials: Sequence[UncutTrial], memory: WorkerMemory, seed: int, elapsed: Callable[[], float]
) -> ChosenPlan:
    """Return the best plan that was found.

    Args:
        seed: of the random changes.
        elapsed: is asked before each step which share of the time is over, and says 1 at the end.

    Raises:
        ConfigurationError: a unit of a trial does not fit a device.
    """
    plain = plain_plan(trials, memory)
    known = {plain: seconds_of_plan(plain, trials, memory)}
    if are_few(trials, memory, FEW_PLACEMENTS):
        every = every_plan(trials, memory)
        known |= {plan: seconds_of_plan(plan, trials, memory) for plan in every}
        best = min(known, key=known.__getitem__)
        return ChosenPlan(best, known[best], known[plain])
    options, random = PlacementOptions(trials, memory), Random(seed)
    first = first_plan(options)
    coarse = TimelineSeconds(options, first.placements, first.order)
    found, coarse_steps = metropolis(
        options, coarse, first.placements, random, lambda: elapsed() < COARSE
    )
    starts = [
        replace(first, placements=placed, pick=pick)
        for placed in dict.fromkeys((first.placements, found))
        for pick in PICKS
    ]
    begun = {plan: QueueSeconds(options, plan) for plan in starts}
    start = min(begun, key=lambda plan: begun[plan].seconds)
    queues = begun[start]
    known[start] = queues.seconds
    found, queue_steps = metropolis(
        options, queues, start.placements, random, lambda: elapsed() < 1.0
    )
    end = replace(start, placements=found)
    known[end] = QueueSeconds(options, end).seconds
    best = min(known, key=known.__getitem__)
    share = coarse.timeline.looked_at / max(1, coarse_steps * len(coarse.timeline.tasks))
    again = queues.simulated / max(1, queues.asked)
    return ChosenPlan(best, known[best], known[plain], coarse_steps, queue_steps, share, again)


def seconds_of_plan(plan: JointPlan, trials: Sequence[UncutTrial], memory: WorkerMemory) -> float:
    """Return the seconds of a plan in the queues of a worker; infinity if they can't do it."""
    try:
        return seconds_of(simulated_plan(plan, trials, memory))
    except ConfigurationError:
        return math.inf


def first_plan(options: PlacementOptions) -> JointPlan:
    """Return each trial on the device that is busy least, the longest trial first."""
    numbers = range(len(options.trials))
    placed = [options.shortest(number) for number in numbers]
    alone = [options.alone(number, each) for number, each in enumerate(placed)]
    order = sorted(numbers, key=lambda number: -alone[number])
    busy = dict.fromkeys(options.devices, 0.0)
    for number in order:
        for device in sorted(busy, key=busy.__getitem__):
            there = replace(placed[number], devices=(device,))
            if options.tasks(number, there):
                placed[number] = there
                busy[device] += options.alone(number, there)
                break
    return JointPlan(tuple(placed), tuple(order), len(placed), DEFAULT_PICK)


def metropolis(
    options: PlacementOptions,
    judge: TimelineSeconds | QueueSeconds,
    placements: Sequence[TrialPlacement],
    random: Random,
    go_on: Callable[[], bool],
) -> tuple[tuple[TrialPlacement, ...], int]:
    """Return the best placements that random changes led to, and how many were tried."""
    now, best = list(placements), tuple(placements)
    seconds = least = judge.seconds
    steps = 0
    while go_on():
        steps += 1
        changed = options.change(now, judge.slowest(), random)
        if not changed:
            continue
        judge.change(changed)
        after = judge.seconds
        if after > seconds and random.random() >= math.exp((seconds - after) / seconds / WARMTH):
            judge.undo()
            continue
        seconds = after
        for number, placed in changed.items():
            now[number] = placed
        if seconds < least:
            least, best = seconds, tuple(now)
    return best, steps
