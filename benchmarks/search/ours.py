"""Measures our part: a grid, Hyperband or ASHA through `fit` over a DataFrame."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import pandas as pd
from torch import nn

from benchmarks.search.space import GRID, SPACE
from benchmarks.search.work import (
    BATCH,
    ETA,
    WORKERS,
    Epoch,
    Figures,
    Job,
    Point,
    make_net,
    make_optimizer,
    serve,
)
from cerebro_hydra import (
    ASHASearch,
    GridSearch,
    HyperbandSearch,
    LocalStore,
    RandomSearch,
    SparkBackend,
    SparkEstimator,
    hp_choice,
    local_spark,
)
from cerebro_hydra.observe import Decision, Record
from cerebro_hydra.plan.messages.instructions import Commit, EndEpoch
from cerebro_hydra.tune.search import Search

AGAIN = 5  # trials of a grid's best point, with other seeds


def estimator_gen_fn(params: Point) -> SparkEstimator:
    """Return a trial as users write it."""
    net = make_net(params["width"])
    return SparkEstimator(
        model=net,
        optimizer=make_optimizer(net, params),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=BATCH,
    )


class Curve:
    """Notes every epoch that a trial has ended, as an observer of the run."""

    def __init__(self) -> None:
        self.begun = time.time()
        self.sub_epochs = 0
        self.epochs: list[Epoch] = []

    def on_record(self, record: Record) -> None:
        """Take in one record of the run."""
        if not isinstance(record, Decision):
            return
        for each in record.instructions:
            if isinstance(each, Commit):
                self.sub_epochs += 1
            if isinstance(each, EndEpoch):
                accuracy = each.metrics["val_accuracy"]
                trained = self.sub_epochs / WORKERS
                self.epochs.append(Epoch(record.time - self.begun, trained, accuracy))


def measure(job: Job) -> Figures:
    """Run a search through `fit`, from its call to its end."""
    rows = job.load_rows()
    table = pd.concat(
        pd.DataFrame(
            {
                "features": list(rows[f"{name}_pixels"]),
                "label": rows[f"{name}_labels"],
                "held_out": name == "held_out",
            }
        )
        for name in ("train", "held_out")
    )
    spark = local_spark(workers=WORKERS)
    df = spark.createDataFrame(table, "features array<float>, label long, held_out boolean")
    with tempfile.TemporaryDirectory() as folder:
        curve = Curve()
        given: dict[str, Any] = {
            "backend": SparkBackend(spark_context=spark, num_workers=WORKERS),
            "store": LocalStore(prefix_path=folder),
            "estimator_gen_fn": estimator_gen_fn,
            "num_epochs": job.epochs,
            "evaluation_metric": "accuracy",
            "validation": "held_out",
            "seed": job.seed,
            "verbose": 0,
            "observers": [curve],
        }
        drawn: dict[str, Any] = {"search_space": SPACE, "num_models": len(job.points)}
        search: Search
        match job.search:
            case "grid":
                search = GridSearch(search_space=GRID, **given)
            case "hyperband":
                search = HyperbandSearch(eta=ETA, **drawn, **given)
            case "asha":
                search = ASHASearch(eta=ETA, **drawn, **given)
            case _:
                search = RandomSearch(**drawn, **given)
        result = search.fit(df)
        seconds = time.time() - curve.begun
        if [dict(trial.params) for trial in result.trials] != list(job.points):
            raise SystemExit("the search tried other points than the other parts")
        again = list[float]()
        if job.search == "grid":
            best = {name: hp_choice([each]) for name, each in result.best_trial.params.items()}
            best["again"] = hp_choice(list(range(AGAIN)))
            given |= {"seed": job.seed + 1000, "observers": []}
            trials = GridSearch(search_space=best, **given).fit(df).trials
            again = [max(trial.history["val_accuracy"]) for trial in trials]
    return Figures(seconds, curve.epochs, again)


if __name__ == "__main__":
    local_spark(workers=WORKERS)
    serve(measure)
