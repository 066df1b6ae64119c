"""A driver of its own, with Spark or without it, to be killed at any moment, or to resume a run.

`python -m tests.chaos.driver FOLDER KIND WORKERS PLACE [RUN]` ends with 0 when the run is over;
PLACE is "spark" or "local".
"""

from __future__ import annotations

import sys
from typing import Any

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import CustomSearch
from cerebro_hydra.tune.search import Search
from tests.chaos import models
from tests.end_to_end.runs import classes, frame_of
from tests.tune.searchers import Rungs

PARTITIONS = 3
RATES = [0.02, 0.01, 0.003, 0.001]
EPOCHS = 4


def search(folder: str, kind: str, backend: Any, **options: Any) -> Search:
    """Return the search of a kind: a grid, one that keeps the best state, or one by rungs."""
    settings: dict[str, Any] = {
        "backend": backend,
        "store": LocalStore(folder),
        "estimator_gen_fn": models.feed_forward,
        "num_epochs": EPOCHS,
        "order": "seeded",
        "verbose": 0,
        "keep": "best" if kind == "best" else "last",
        "checkpoint": "sub-epoch" if kind == "best" else "epoch",
        **options,
    }
    if kind == "rungs":
        return CustomSearch(make_searcher=lambda: Rungs(4, EPOCHS), **settings)
    return GridSearch(search_space={"lr": hp_choice(RATES)}, **settings)


def main(folder: str, kind: str, workers: str, place: str, run: str | None = None) -> None:
    rows: Any = classes(240)
    if place == "local":
        search(folder, kind, LocalBackend(int(workers))).fit(rows, resume=run)
        return
    spark = cerebro_hydra.local_spark(workers=int(workers))
    backend = SparkBackend(spark_context=spark.sparkContext, num_workers=int(workers))
    search(folder, kind, backend).fit(frame_of(spark, rows), resume=run)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
