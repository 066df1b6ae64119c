"""Simulates whole runs in which workers hold several sub-epochs and share several devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from benchmarks.scheduler.bound import lower_bound
from cerebro_hydra.plan.costs.moves import FREE_MOVES, MoveRates
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.queues.pick import PICKS, Ahead, Candidate, Rule, sharp
from cerebro_hydra.plan.queues.visit_spec import UNIT_SECONDS, ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.run import Simulation
from cerebro_hydra.plan.simulate.worker import SimulatedDevices
from tests.plan.closed_search import ClosedSearch

SHARDS, STEPS, EPOCHS = 4, 6, 2
SLOTS = 3  # one computes, one is loaded, one is written back
PROMOTION = 0.5  # over the time of a mean forward
INSTANCES = ((2, 8), (4, 8))  # workers and trials
SPREADS = (0.0, 0.5)  # of the trials' costs, as the sigma of a lognormal
DEVICES = (1, 2, 4)
RESIDENTS = (1, 2, 4, 8)
SEARCHES = 200  # of each kind, with the look-ahead and without


@dataclass(frozen=True)
class Search:
    """Is a search of trials that cost so much, with the workers and devices that it has."""

    workers: int
    costs: Sequence[float]
    devices: int
    residents: int
    epochs: int = EPOCHS
    evaluate: bool = True
    shards: int = SHARDS
    steps: int = STEPS
    by_modules: bool = False
    promotion: float = PROMOTION
    slots: int = SLOTS
    unit_seconds: float = UNIT_SECONDS

    def visit(self, kind: TaskKind, trial: int, partition: int, number: int) -> VisitSpec:
        """Describe a task."""
        shard = ShardSpec(1, forward=self.costs[trial], backward=2 * self.costs[trial])
        graph = TaskGraph(self.shards, self.steps, training=kind == "train")
        return VisitSpec(
            number,
            graph,
            (shard,) * self.shards,
            by_modules=self.by_modules,
            unit_seconds=self.unit_seconds,
        )

    def seconds(self, kind: TaskKind, trial: int, partition: int) -> float:
        """Return the device seconds of a task."""
        tasks = self.shards * self.steps * (3 if kind == "train" else 1)
        return tasks * self.costs[trial]

    @property
    def held(self) -> list[tuple[int, ...]]:
        """Return the partitions of each worker."""
        return [(worker,) for worker in range(self.workers)]

    @property
    def closed(self) -> ClosedSearch:
        """Return its trials and what is fixed for them."""
        trials = tuple(
            TrialConfig(trial, cost, 10**8, (("frozen", f"t{trial}"),))
            for trial, cost in enumerate(self.costs)
        )
        return ClosedSearch(HopConfig(self.workers, evaluate=self.evaluate), trials, self.epochs)

    def makespan(self, rule: Rule) -> float:
        """Return how long it takes."""
        rates = MoveRates(device=1 / self.promotion) if self.promotion else FREE_MOVES
        budgets = (self.slots,) * self.devices
        shape = SimulatedDevices(budgets, self.residents, self.visit, None, rates, rule)
        return Simulation(self.closed, self.held, self.seconds, devices=shape).run().makespan

    def over_bound(self, rule: Rule) -> float:
        """Return the makespan over the larger of the longest trial and the fullest worker."""
        bound = lower_bound(self.closed, self.held, self.seconds, self.devices)
        return self.makespan(rule) / bound


def random_search(seed: int, hops: bool) -> Search:
    """Return a search whose every unit is a task, or a microbatch where it stays on a device.

    Args:
        hops: whether trials may hop on, or else are all at one worker from the start.
    """
    random = Random(seed)
    devices = random.randint(1 if hops else 2, 4 if hops else 3)
    trials = random.randint(2, 10) if hops else random.randint(devices, devices + 3)
    sigma = random.choice([0.0, 0.5, 1.2])
    return Search(
        workers=random.randint(1, 4) if hops else 1,
        costs=[random.lognormvariate(0, sigma) for _ in range(trials)],
        devices=devices,
        residents=random.choice([devices, devices + 1, 2 * devices, 8]) if hops else trials,
        epochs=random.randint(1, 2) if hops else 1,
        evaluate=random.random() < 0.5,
        shards=random.randint(2, 5 if hops else 3),
        steps=random.randint(2, 8) if hops else random.randint(1, 3),
        by_modules=random.random() < 0.5,
        promotion=random.choice([0.0, 0.0, 0.25, 1.0]),
        slots=random.choice([2, 3, 6]),
        unit_seconds=0.0,
    )


def longest_first(candidates: Sequence[Candidate], ahead: Ahead) -> Candidate | None:
    """Pick as "sharp" does while it does not look ahead."""
    return sharp(candidates)


def compare_outlooks(searches: int) -> None:
    """Print how long random searches take with the look-ahead, over how long without."""
    print("| trials | searches | mean | best | worst | changed |")
    print("| --- " * 6 + "|")
    for name, hops in (("hop", True), ("are there from the start", False)):
        found = [random_search(seed, hops) for seed in range(searches)]
        ratios = [each.makespan(sharp) / each.makespan(longest_first) for each in found]
        changed = sum(ratio != 1.0 for ratio in ratios)
        figures = " | ".join(f"{of(ratios):.4f}" for of in (fmean, min, max))
        print(f"| {name} | {searches} | {figures} | {changed} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs: one instance")
    parser.add_argument("--ahead", action="store_true", help="only compare with and without")
    asked = parser.parse_args()
    if asked.ahead:
        compare_outlooks(4 if asked.quick else SEARCHES)
        return
    quick = asked.quick
    places = " | ".join(f"{residents}" for residents in RESIDENTS)
    print(f"| workers x trials | costs | devices | pick | {places} | devices + 1 |")
    print("| --- " * (5 + len(RESIDENTS)) + "|")
    for workers, trials in [(2, 4)] if quick else INSTANCES:
        for spread in SPREADS[: 1 if quick else None]:
            random = Random(0)
            costs = [random.lognormvariate(0, spread) for _ in range(trials)]
            for devices in DEVICES[: 1 if quick else None]:
                for name, rule in PICKS.items():
                    ratios = [
                        Search(workers, costs, devices, residents).over_bound(rule)
                        for residents in (*RESIDENTS, devices + 1)
                    ]
                    row = " | ".join(f"{ratio:.3f}" for ratio in ratios)
                    spread_text = "equal" if spread == 0 else f"sigma {spread:g}"
                    print(
                        f"| {workers} x {trials} | {spread_text} | {devices} | {name} | {row} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
