"""Measures our part: a GridSearch over a DataFrame, and the time of each of its stages."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pandas as pd
from nets import make_adam, make_net
from torch import nn
from work import EPOCHS, GRID, SEED, VALIDATION, WORKERS, digits

from cerebro_hydra import (
    GridSearch,
    LocalStore,
    SparkBackend,
    SparkEstimator,
    hp_choice,
    local_spark,
)
from cerebro_hydra.observe import Decision, Record, RunStarted, TrialAdmitted
from cerebro_hydra.plan.messages.events import EvaluationDone, SubEpochDone
from cerebro_hydra.plan.messages.instructions import StartSubEpoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    net = arguments.net

    def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
        model = make_net(net)
        return SparkEstimator(
            model=model,
            optimizer=make_adam(model, params["lr"]),
            loss=nn.CrossEntropyLoss(),
            metrics=["accuracy"],
            batch_size=params["batch_size"],
        )

    spark = local_spark(workers=WORKERS)
    pixels, labels = digits(arguments.rows)
    table = pd.DataFrame({"features": list(pixels), "label": labels})
    df = spark.createDataFrame(table, "features array<float>, label long")
    begun = time.time()
    backend = SparkBackend(spark_context=spark, num_workers=WORKERS)
    ready = time.time()
    stages = Stages()
    with tempfile.TemporaryDirectory() as folder:
        search = GridSearch(
            backend=backend,
            store=LocalStore(prefix_path=folder),
            estimator_gen_fn=estimator_gen_fn,
            search_space={name: hp_choice(values) for name, values in GRID.items()},
            num_epochs=EPOCHS,
            evaluation_metric="accuracy",
            validation=VALIDATION,
            seed=SEED,
            verbose=0,
            observers=[stages],
        )
        started = time.time()
        result = search.fit(df)
        document: dict[str, Any] = stages.split(started, time.time())
        document["backend"] = ready - begun
        document["val_accuracy"] = [t.history["val_accuracy"][-1] for t in result.trials]
    arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    spark.stop()


class Stages:
    """Notes when the stages of a run begin and end, as it tells its observers."""

    def __init__(self) -> None:
        self.prepared = 0.0  # seconds since 1970, as all of these
        self.admitted = 0.0
        self.begun = 0.0
        self.done = 0.0
        self.busy = 0.0

    def on_record(self, record: Record) -> None:
        """Take in one record of the run."""
        match record:
            case RunStarted():
                self.prepared = time.time()
            case TrialAdmitted():
                self.admitted = time.time()
            case Decision():
                starts = any(isinstance(each, StartSubEpoch) for each in record.instructions)
                if starts and not self.begun:
                    self.begun = record.time
                if isinstance(record.event, SubEpochDone | EvaluationDone):
                    self.done = record.time
                    self.busy += record.event.seconds

    def split(self, started: float, ended: float) -> dict[str, float]:
        """Return the seconds of `fit` and of its stages; admission lies beside the next two."""
        return {
            "fit": ended - started,
            "prepare": self.prepared - started,
            "admission": self.admitted - self.prepared,
            "start": self.begun - self.prepared,
            "training": self.done - self.begun,
            "end": ended - self.done,
            "busy": self.busy,
        }


if __name__ == "__main__":
    main()
