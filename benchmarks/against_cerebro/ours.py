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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", required=True)
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
    pixels, labels = digits()
    table = pd.DataFrame({"features": list(pixels), "label": labels})
    df = spark.createDataFrame(table, "features array<float>, label long")
    begun = time.time()
    backend = SparkBackend(spark_context=spark, num_workers=WORKERS)
    ready = time.time()
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
        )
        started = time.time()
        result = search.fit(df)
        ended = time.time()
        document = split(started, ended, Path(folder), Path(result.run_path))
        document["backend"] = ready - begun
        document["val_accuracy"] = [t.history["val_accuracy"][-1] for t in result.trials]
    arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    spark.stop()


def split(started: float, ended: float, store: Path, run: Path) -> dict[str, Any]:
    """Return the seconds of each stage of `fit`, from times in the store and the journal."""
    (manifest,) = store.glob("data/*/manifest.json")
    prepared = manifest.stat().st_mtime
    admitted = (run / "run.json").stat().st_mtime
    lines = [
        json.loads(line)
        for segment in sorted(run.glob("journal/*.jsonl"))
        for line in segment.read_text().splitlines()
    ][1:]
    begun = next(
        line["time"]
        for line in lines
        if any(each["type"] == "StartSubEpoch" for each in line["instructions"])
    )
    done = [line for line in lines if line["event"]["type"] in ("SubEpochDone", "EvaluationDone")]
    return {
        "fit": ended - started,
        "prepare": prepared - started,
        "admission": admitted - prepared,
        "start": begun - admitted,
        "training": done[-1]["time"] - begun,
        "end": ended - done[-1]["time"],
        "busy": sum(line["event"]["seconds"] for line in done),
    }


if __name__ == "__main__":
    main()
