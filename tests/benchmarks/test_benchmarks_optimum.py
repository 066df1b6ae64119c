"""The search for a plan, against the optimum of tiny instances by a mixed-integer programme."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.placement.plan import UncutTrial
from benchmarks.placement.search import chosen_plan
from cerebro_hydra.plan.queues.visit_spec import ShardSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from tests.benchmarks.test_benchmarks_placement import after, memory_of


def least_makespan(chains: Sequence[Sequence[float]], devices: int) -> float:
    """Return the optimum for chains of units, of which each may be on any device, by HiGHS."""
    units = [(trial, k) for trial, chain in enumerate(chains) for k in range(len(chain))]
    longest = sum(map(sum, chains))
    pairs = [(a, b) for a, b in combinations(units, 2) if a[0] != b[0]]
    names = ["end", *units]
    names += [(unit, device) for unit in units for device in range(devices)] + pairs
    at = {name: k for k, name in enumerate(names)}
    rows, least = [], []

    def demand(terms: dict[object, float], at_least: float) -> None:
        row = np.zeros(len(names))
        for name, factor in terms.items():
            row[at[name]] += factor
        rows.append(row)
        least.append(at_least)

    for unit in units:
        trial, k = unit
        seconds = chains[trial][k]
        for sign in (1, -1):
            demand({(unit, device): sign for device in range(devices)}, sign)
        behind = (trial, k + 1) if k + 1 < len(chains[trial]) else "end"
        demand({behind: 1, unit: -1}, seconds)
    for a, b in pairs:
        for device in range(devices):
            both = {(a, device): -longest, (b, device): -longest}
            first, second = chains[a[0]][a[1]], chains[b[0]][b[1]]
            demand({b: 1, a: -1, (a, b): -longest, **both}, first - 3 * longest)
            demand({a: 1, b: -1, (a, b): longest, **both}, second - 2 * longest)
    binary = np.array([0] * (1 + len(units)) + [1] * (len(names) - 1 - len(units)))
    upper = np.where(binary, 1.0, longest)
    goal = np.zeros(len(names))
    goal[0] = 1.0
    found = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), lb=np.array(least)),
        integrality=binary,
        bounds=Bounds(0.0, upper),
    )
    assert found.success, found.message
    return float(found.fun)


@pytest.mark.parametrize("seed", range(8))
def test_trials_of_one_unit_take_the_least_that_they_can(seed: int) -> None:
    """Up to 6 trials on 2 or 3 devices, against the optimum of a mixed-integer programme."""
    random = Random(seed)
    devices = random.choice((2, 3))
    chains = [[float(random.randint(2, 20))] for _ in range(random.randint(devices + 1, 6))]
    found = [
        UncutTrial(TaskGraph(1, 1), kept=(ShardSpec(4, forward=each / 2, backward=each / 2),))
        for (each,) in chains
    ]
    chosen = chosen_plan(found, memory_of(*[None] * devices), seed, after(600))
    assert chosen.seconds == pytest.approx(least_makespan(chains, devices))


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_takes_less_than_the_least_for_its_units(seed: int) -> None:
    """Trials of a few microbatches, each of which is a unit that may be on any device."""
    random = Random(seed)
    chains = [[float(random.randint(2, 9))] * random.randint(1, 2) for _ in range(4)]
    found = [
        UncutTrial(
            TaskGraph(1, len(chain)),
            kept=(ShardSpec(4, forward=chain[0] / 2, backward=chain[0] / 2),),
        )
        for chain in chains
    ]
    least = least_makespan(chains, 2)
    chosen = chosen_plan(found, memory_of(None, None), seed, after(150))
    assert least - 1e-6 <= chosen.seconds <= 1.15 * least
