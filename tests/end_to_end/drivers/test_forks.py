"""A trial that forks another one trains with its own parameters, and is read and replayed whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra import LocalStore, SparkEstimator, replay
from cerebro_hydra.observe import RunView
from cerebro_hydra.observe.report import render
from cerebro_hydra.plan.messages.events import TrialForked
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import CustomSearch
from cerebro_hydra.verification import verify
from tests.end_to_end.runs import Tape, classes
from tests.tune.searchers import Rungs

pytestmark = pytest.mark.slow

PARTITIONS = 2


class Centred(nn.Module):
    """Subtracts the mean of former steps, which is in a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
    """Return a net with all that a fork takes over, and a schedule that it makes anew."""
    layers = [nn.BatchNorm1d(8), Centred(), nn.Dropout(0.2), nn.Linear(8, 4)]
    model = nn.Sequential(nn.Linear(16, 8), *layers)
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=params["lr"] / 10),
        loss=nn.CrossEntropyLoss(),
        batch_size=16,
        shards=["3"],
        ema=0.9,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        lr_interval="epoch",
    )


def search(folder: Path, **options: Any) -> CustomSearch:
    """Climb three rungs with four candidates; the best of each rung is forked."""
    return CustomSearch(
        make_searcher=lambda: Rungs(candidates=4, most_epochs=4),
        backend=LocalBackend(2),
        store=LocalStore(str(folder)),
        estimator_gen_fn=estimator_gen_fn,
        num_epochs=4,
        validation=0.25,
        order="seeded",
        verbose=0,
        **options,
    )


def test_a_fork_goes_on_from_its_parent_with_its_own_parameters(tmp_path: Path) -> None:
    tape = Tape()
    result = search(tmp_path, observers=[tape]).fit(classes())
    folder = RunFolder.open(result.run_path)
    forks = tape.of(TrialForked)
    assert len(forks) == 2
    for event in forks:
        number = event.config.trial
        fork, parent = result.trials[number], result.trials[event.parent]
        shared = event.state // PARTITIONS
        assert fork.visit_log[: event.state] == parent.visit_log[: event.state]
        for name, values in fork.history.items():
            assert values[:shared] == parent.history[name][:shared]
            assert len(values) == len(fork.visit_log) // PARTITIONS > shared
        view = RunView.of_run(folder).trials[number]
        assert view.result_state == (view.result_epoch + 1) * PARTITIONS
        trained = [s for s in folder.read_state(number, view.result_state)["shards"]]
        if view.result_state > event.state:
            rate = fork.params["lr"] / 10 * 0.5**view.result_epoch
            for shard in trained:
                assert shard["cursor"]["groups"][0]["lr"] == pytest.approx(rate)
    for trial in result.trials:
        assert replay(result.run_path, trial.trial_id, estimator_gen_fn).identical
    assert verify(result.run_path).ok
    assert "trial-005" in render(folder)
