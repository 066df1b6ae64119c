"""An event concerns few trials; deciding about all of them after each event changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.policy.policy import Scheduler
from cerebro_hydra.plan.simulate.run import ClosedSearch, SimulatedTimeline, Simulation, WorkerCrash


class Thorough(HopState):
    """Draws consequences for every trial after every event."""

    def _draw_consequences(self, concerned: Iterable[int]) -> None:
        super()._draw_consequences(sorted(self.trials))


def simulated(kind: type[HopState], seed: int) -> SimulatedTimeline:
    random = Random(seed)
    workers, patience = random.randint(2, 4), random.choice([None, 1, 2])
    each = tuple(
        TrialConfig(
            t,
            1.0,
            100,
            (("same", f"t{t}"),),
            patience=patience,
            keep=random.choice(["best", "last"]),
        )
        for t in range(random.randint(2, 9))
    )
    config = HopConfig(workers, seed=seed, order=random.choice(["dynamic", "seeded"]))
    crashes = [WorkerCrash(random.uniform(1, 20), random.randrange(workers), 0.5) for _ in range(3)]
    metrics = {(trial, epoch): random.random() for trial in range(9) for epoch in range(3)}

    def seconds(kind: TaskKind, trial: int, partition: int) -> float:
        return 1 + 0.1 * trial + 0.3 * partition

    simulation = Simulation(
        ClosedSearch(config, each, 3),
        [(p,) for p in range(workers)],
        seconds,
        hop_seconds=0.05,
        crashes=crashes,
        metric=lambda trial, epoch: metrics[trial, epoch],
    )
    simulation.scheduler = Scheduler(config, kind(config))
    return simulation.run()


@pytest.mark.parametrize("seed", range(8))
def test_the_instructions_are_those_of_deciding_about_every_trial(seed: int) -> None:
    assert simulated(HopState, seed).records == simulated(Thorough, seed).records
