"""A driver without Spark whose searcher forks trials, to be killed by a test or to be resumed.

`python -m tests.end_to_end.drivers.forked_driver FOLDER [RUN]` prints a line per decision.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from cerebro_hydra import LocalStore, SparkEstimator
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import CustomSearch
from tests.end_to_end.drivers.resumed_driver import Ticker, rows
from tests.tune.searchers import Rungs


def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
    """Return a net with all that a fork takes over, and a schedule that it makes anew."""
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=params["lr"] / 10),
        loss=nn.CrossEntropyLoss(),
        batch_size=16,
        shards=["3"],  # by name, because a cut by number follows measured times, as do its digests
        ema=0.9,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        lr_interval="epoch",
    )


def search(folder: str, **options: Any) -> CustomSearch:
    """Climb three rungs with four candidates; the best of each rung is forked."""
    return CustomSearch(
        make_searcher=lambda: Rungs(candidates=4, most_epochs=4),
        backend=LocalBackend(2),
        store=LocalStore(folder),
        estimator_gen_fn=estimator_gen_fn,
        num_epochs=4,
        validation=0.25,
        order="seeded",
        verbose=0,
        **options,
    )


if __name__ == "__main__":
    place, *run = sys.argv[1:]
    search(place, observers=[Ticker()]).fit(rows(), resume=run[0] if run else None)
