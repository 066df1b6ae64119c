"""An event concerns few trials; deciding about all of them after each event changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.simulate.run import ClosedSearch, Simulation, WorkerCrash


def simulation_of(seed: int, on_decision: Callable[[HopState], None]) -> Simulation:
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
        on_decision=lambda event, instructions: on_decision(simulation.state),
    )
    return simulation


@pytest.mark.parametrize("seed", range(8))
def test_nothing_follows_for_trials_that_an_event_does_not_concern(seed: int) -> None:
    decisions = 0

    def decide_about_all(state: HopState) -> None:
        nonlocal decisions
        decisions += 1
        assert state.consequences(sorted(state.trials)) == []

    simulation_of(seed, decide_about_all).run()
    assert decisions > 20
