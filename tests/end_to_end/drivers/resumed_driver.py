"""A driver without Spark that trains in a folder, to be killed by a test.

`python -m tests.end_to_end.drivers.resumed_driver FOLDER WORKERS [DEVICES]` prints a line per
decision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cerebro_hydra import GridSearch
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end import models
from tests.end_to_end.runs import Tape, classes, grid

SPACE = {"lr": [0.01, 0.003, 0.001], "dropout": [0.2]}


DEVICE_MEMORY = 26_000
"""Bytes of which a trial needs more."""


def search(
    folder: str | Path, workers: int, devices: int | None = None, **options: Any
) -> GridSearch:
    """Return a search over three trials, which ends with the same bits whatever happens to it."""
    given = {"num_epochs": 3, "order": "seeded", "evaluation_metric": "loss", **options}
    space, factory = given.pop("space", SPACE), given.pop("factory", models.feed_forward)
    resources = {"devices_per_worker": devices, "device_memory": DEVICE_MEMORY} if devices else {}
    backend = LocalBackend(workers, **resources)
    return grid(backend, given.pop("store", Path(folder)), factory, space, **given)


if __name__ == "__main__":
    ticker = Tape(lambda tape: print(tape.decisions, flush=True))
    place, *counts = sys.argv[1:]
    search(place, *map(int, counts), checkpoint="sub-epoch", observers=[ticker]).fit(classes())
