"""Simulates whole runs in which workers hold several sub-epochs and share several devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from random import Random

from benchmarks.scheduler.bound import lower_bound
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.pick import PICKS, Rule
from cerebro_hydra.plan.simulate.run import ClosedSearch, Simulation
from cerebro_hydra.plan.simulate.worker import SimulatedDevices

SHARDS, STEPS, EPOCHS = 4, 6, 2
SLOTS = 3  # one computes, one is loaded, one is written back
PROMOTION = 0.5  # over the time of a mean forward
INSTANCES = ((2, 8), (4, 8))  # workers and trials
SPREADS = (0.0, 0.5)  # of the trials' costs, as the sigma of a lognormal
DEVICES = (1, 2, 4)
RESIDENTS = (1, 2, 4, 8)


def makespan_over_bound(
    workers: int, costs: Sequence[float], devices: int, residents: int, rule: Rule
) -> float:
    """Return the makespan over the larger of the longest trial and the fullest worker."""

    def describe(kind: TaskKind, trial: int, partition: int, number: int) -> VisitSpec:
        shard = ShardSpec(1, forward=costs[trial], backward=2 * costs[trial])
        graph = TaskGraph(SHARDS, STEPS, training=kind == "train")
        return VisitSpec(number, graph, (shard,) * SHARDS)

    def seconds(kind: TaskKind, trial: int, partition: int) -> float:
        return SHARDS * STEPS * costs[trial] * (3 if kind == "train" else 1)

    trials = tuple(
        TrialConfig(trial, cost, 10**8, (("frozen", f"t{trial}"),))
        for trial, cost in enumerate(costs)
    )
    search = ClosedSearch(HopConfig(workers), trials, EPOCHS)
    held = [(worker,) for worker in range(workers)]
    shape = SimulatedDevices(
        (SLOTS,) * devices, residents, describe, None, MoveRates(device=1 / PROMOTION), rule
    )
    simulation = Simulation(search, held, seconds, devices=shape)
    return simulation.run().makespan / lower_bound(search, held, seconds, devices)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs: one instance")
    quick = parser.parse_args().quick
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
                        makespan_over_bound(workers, costs, devices, residents, rule)
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
