"""A driver without Spark that trains in a folder, to be killed by a test, or resumes a run there.

`python -m tests.end_to_end.drivers.resumed_driver FOLDER WORKERS [RUN]` prints a line per decision.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cerebro_hydra import GridSearch, LocalStore, hp_choice
from cerebro_hydra.observe import Decision
from cerebro_hydra.testing.local_backend import Arrays, LocalBackend
from tests.end_to_end import models

RATES = [0.01, 0.003, 0.001]


class Ticker:
    """Prints a line per decision, so that a test can kill this process at any of them."""

    def on_record(self, record: Any) -> None:
        if isinstance(record, Decision):
            print(type(record.event).__name__, flush=True)


def rows() -> Arrays:
    random = np.random.default_rng(7)
    y = random.integers(0, 4, 200)
    x = random.normal(size=(200, 16)) + y.reshape(-1, 1) / 3
    return Arrays({"features": x.astype(np.float32), "label": y})


def space(*rates: float) -> dict[str, Any]:
    return {"lr": hp_choice(list(rates)), "dropout": hp_choice([0.2])}


def search(folder: str, workers: int, **options: Any) -> GridSearch:
    settings = {
        "store": LocalStore(folder),
        "estimator_gen_fn": models.feed_forward,
        "search_space": space(*RATES),
        "num_epochs": 3,
        "order": "seeded",
        "verbose": 0,
        "observers": [Ticker()],
    }
    return GridSearch(backend=LocalBackend(workers), **{**settings, **options})


if __name__ == "__main__":
    place, count, *run = sys.argv[1:]
    cadence = "sub-epoch" if place.endswith("sub-epoch") else "epoch"
    search(place, int(count), checkpoint=cadence).fit(rows(), resume=run[0] if run else None)
