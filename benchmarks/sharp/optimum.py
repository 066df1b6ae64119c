"""Compares the picks with the optimum of small instances, and with the bound of larger ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from random import Random
from statistics import fmean

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.events import VisitsExpected
from cerebro_hydra.plan.queues.pick import PICKS, Rule
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation

INSTANCES, WORKLOADS = 40, 96
LIMIT = 60.0  # seconds that the solver has for an instance
SIGMAS = {"equal": 0.0, "mild": 0.5, "wide": 1.2, "few": 0.7}  # of the trials' costs
PROMOTIONS = (0.25, 0.5, 1.0, 1.5)  # over the time of a forward
SLOTS = (2, 3, 6)  # of the largest shard, on each device

Chain = list[float]
"""The seconds of units that come one after the other, none of which can be interrupted."""


@dataclass(frozen=True)
class Workload:
    """Holds visits that are all there from the start, and the devices that they share."""

    devices: int
    visits: Sequence[VisitSpec]
    promotion: float = 0.0
    budget: int | None = None

    def makespan(self, rule: Rule) -> float:
        """Return the makespan of the queues."""

        def seconds(action: Action) -> float:
            shard = self.visits[action.trial].shards[action.shard]
            if action.kind.computes:
                return shard.seconds(action.kind)
            moves = action.kind in (ActionKind.LOAD, ActionKind.SPILL) and action.device != HOST
            return self.promotion * shard.forward if moves else 0.0

        budgets = [self.budget] * self.devices
        all_there = [(0.0, VisitsExpected(False))]
        simulation = WorkerSimulation(self.visits, budgets, None, rule, seconds, later=all_there)
        return simulation.run().makespan

    def chains(self) -> list[Chain]:
        """Return each visit's units: a microbatch where it stays on its device, else a task."""
        found = []
        for visit in self.visits:
            tasks = [
                [visit.shards[task.shard].seconds(task.kind) for task in visit.graph.tasks(0, m)]
                for m in range(visit.graph.microbatches)
            ]
            found.append(
                [sum(each) for each in tasks]
                if visit.stays
                else list(chain.from_iterable(map(fused, tasks)))
            )
        return found

    def bound(self) -> float:
        """Return the larger of the longest visit, with its first promotion, and a device's part."""
        work = [sum(each) for each in self.chains()]
        first = [self.promotion * visit.shards[0].forward for visit in self.visits]
        longest = max(w + f for w, f in zip(work, first, strict=True))
        return max(longest, sum(work) / self.devices)


def fused(tasks: Sequence[float]) -> Chain:
    """Return the seconds of the units of F0 ... Fn Bn Un ... B0 U0: Fn and Bn are one."""
    forwards = len(tasks) // 3
    pairs = [sum(tasks[n : n + 2]) for n in range(forwards, len(tasks), 2)]
    return [*tasks[: forwards - 1], tasks[forwards - 1] + pairs[0], *pairs[1:]]


def instance(seed: int) -> Workload:
    """Return a few short visits on two or three devices, whose moves take no time."""
    random = Random(1000 + seed)
    devices = 2 if random.random() < 0.7 else 3
    trials, stays = random.randint(devices, devices + 2), random.random() < 0.5
    visits = []
    for number in range(trials):
        shards, cost = random.randint(2, 3), random.lognormvariate(0, 0.6)
        microbatches = random.randint(2, 4) if stays else 1
        costs = [[cost * random.lognormvariate(0, 0.3) for _ in "FB"] for _ in range(shards)]
        specs = [ShardSpec(1, forward=f, backward=2 * b) for f, b in costs]
        visits.append(visit(number, microbatches, specs, stays))
    return Workload(devices, visits)


def workload(seed: int, kind: str) -> Workload:
    """Return visits of some steps on up to four devices that can't hold them all."""
    random = Random(4 * seed + list(SIGMAS).index(kind))
    devices, promotion = random.choice([1, 2, 4]), random.choice(PROMOTIONS)
    trials = random.randint(1, devices if kind == "few" else 3 * devices)
    stays, sigma = random.random() < 0.5, SIGMAS[kind]
    visits = []
    for number in range(trials):
        shards, cost = random.randint(2, 6), random.lognormvariate(0, sigma)
        spread = 0.2 if sigma else 0.0
        costs = [cost * random.lognormvariate(0, spread) for _ in range(shards)]
        specs = [ShardSpec(1 + int(1000 * f), forward=f, backward=2 * f) for f in costs]
        visits.append(visit(number, random.randint(3, 6), specs, stays))
    largest = max(shard.state for each in visits for shard in each.shards)
    return Workload(devices, visits, promotion, largest * random.choice(SLOTS))


def visit(number: int, microbatches: int, shards: list[ShardSpec], stays: bool) -> VisitSpec:
    """Return a visit whose every task, or microbatch, is a unit."""
    graph = TaskGraph(len(shards), microbatches)
    return VisitSpec(number, graph, tuple(shards), by_modules=stays, unit_seconds=0.0)


class Model:
    """A mixed-integer programme that is written row by row."""

    def __init__(self) -> None:
        self._rows: list[tuple[Mapping[int, float], float, float]] = []

    def add(self, terms: Mapping[int, float], least: float, most: float = np.inf) -> None:
        """Ask for a sum of variables, by their columns, between two values."""
        self._rows.append((terms, least, most))

    def minimum(
        self, lower: np.ndarray, upper: np.ndarray, whole: np.ndarray
    ) -> tuple[float, bool]:
        """Return the least value of the first variable, and whether that is proven.

        Where it is not, the value is the bound that was reached within `LIMIT`.
        """
        entries = [
            (row, column, factor)
            for row, (terms, _, _) in enumerate(self._rows)
            for column, factor in terms.items()
        ]
        at, columns, factors = (np.array(each) for each in zip(*entries, strict=True))
        matrix = coo_array((factors, (at, columns)), (len(self._rows), len(lower))).tocsr()
        least, most = (np.array([row[n] for row in self._rows]) for n in (1, 2))
        found = milp(
            np.eye(1, len(lower))[0],
            constraints=LinearConstraint(matrix, least, most),
            bounds=Bounds(lower, upper),
            integrality=whole,
            options={"time_limit": LIMIT, "mip_rel_gap": 1e-4},
        )
        return (found.fun, True) if found.status == 0 else (found.mip_dual_bound, False)


def optimum(
    chains: Sequence[Chain], devices: int, known: float, bound: float
) -> tuple[float, bool]:
    """Return the least makespan, and whether it is proven, by a programme with disjunctions.

    Its variables are the makespan, the begin of each unit, whether a unit is on a device, and of
    two units of different visits, whether the first one comes first.

    Args:
        known: a makespan that was reached.
        bound: a makespan that none is below.
    """
    units = [(number, seconds) for number, each in enumerate(chains) for seconds in each]
    pairs = [(a, b) for a, b in combinations(range(len(units)), 2) if units[a][0] != units[b][0]]
    ons = 1 + len(units)
    firsts = ons + len(units) * devices
    model, large = Model(), known * 1.0001

    def on(unit: int, device: int) -> int:
        return ons + unit * devices + device

    for unit, (owner, seconds) in enumerate(units):
        model.add({on(unit, device): 1.0 for device in range(devices)}, 1.0, 1.0)
        follows = unit + 1 < len(units) and units[unit + 1][0] == owner
        model.add({(2 + unit if follows else 0): 1.0, 1 + unit: -1.0}, seconds)
    for device in range(devices):
        of_device = {on(unit, device): -seconds for unit, (_, seconds) in enumerate(units)}
        model.add({0: 1.0, **of_device}, 0.0)
    for first, (a, b) in enumerate(pairs, firsts):
        for device in range(devices):
            both = {on(a, device): -large, on(b, device): -large}
            model.add({1 + b: 1.0, 1 + a: -1.0, first: -large, **both}, units[a][1] - 3 * large)
            model.add({1 + a: 1.0, 1 + b: -1.0, first: large, **both}, units[b][1] - 2 * large)
    variables = firsts + len(pairs)
    lower, upper, whole = np.zeros(variables), np.ones(variables), np.ones(variables)
    lower[0], upper[:ons], whole[:ons] = bound, large, 0
    lower[on(0, 0)] = 1.0  # devices are alike
    return model.minimum(lower, upper, whole)


def over_optimum(instances: int) -> Iterator[tuple[dict[str, float], bool]]:
    """Yield each pick's makespan over the optimum, and whether that is proven."""
    for seed in range(instances):
        small = instance(seed)
        found = {name: small.makespan(rule) for name, rule in PICKS.items()}
        best, bound = min(found.values()), small.bound()
        least, proven = (best, True)
        if best > bound * (1 + 1e-9):
            least, proven = optimum(small.chains(), small.devices, best, bound)
        yield {name: each / least for name, each in found.items()}, proven


def over_bound(workloads: int, kind: str) -> Iterator[dict[str, float]]:
    """Yield each pick's makespan over the bound."""
    for seed in range(workloads // len(SIGMAS)):
        given = workload(seed, kind)
        yield {name: given.makespan(rule) / given.bound() for name, rule in PICKS.items()}


def row(what: str, figures: Sequence[Mapping[str, float]], note: str = "") -> str:
    """Return a row of the table: mean and worst of each pick."""
    cells = [
        f"{fmean(values):.3f} | {max(values):.3f}"
        for values in ([each[name] for each in figures] for name in PICKS)
    ]
    return f"| {what} | {len(figures)} | {' | '.join(cells)} | {note} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs: four of each")
    quick = parser.parse_args().quick
    picks = " | ".join(f"{name}, mean | worst" for name in PICKS)
    print(f"| over | cases | {picks} | |")
    print("| --- " * (3 + 2 * len(PICKS)) + "|")
    found = list(over_optimum(4 if quick else INSTANCES))
    unproven = sum(not proven for _, proven in found)
    note = f"{unproven} over the solver's lower bound" if unproven else "all proven"
    print(row("the optimum", [figures for figures, _ in found], note), flush=True)
    for kind in SIGMAS:
        print(
            row(f"the bound, {kind}", list(over_bound(4 if quick else WORKLOADS, kind))), flush=True
        )


if __name__ == "__main__":
    main()
