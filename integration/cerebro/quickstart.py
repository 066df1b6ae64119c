"""Runs Cerebro's quick start with a PyTorch model: its search over our hopper."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}

import torch
from cerebro.tune import GridSearch, hp_choice
from hopping import HoppingBackend, HoppingStore, hopping
from sklearn.datasets import load_digits
from torch import nn

from cerebro_hydra import SparkBackend, SparkEstimator, local_spark


def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
    """Maps 64 pixels to ten digits with one hidden layer."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=params["batch_size"],
    )


def main() -> None:
    spark = local_spark(workers=2)
    pixels, labels = load_digits(return_X_y=True)
    rows = [((p / 16).tolist(), int(n)) for p, n in zip(pixels, labels, strict=True)]
    df = spark.createDataFrame(rows, "features array<float>, label long")
    with tempfile.TemporaryDirectory() as folder:
        search = GridSearch(
            backend=HoppingBackend(SparkBackend(spark_context=spark.sparkContext, num_workers=2)),
            store=HoppingStore(folder),
            estimator_gen_fn=hopping(estimator_gen_fn),
            search_space={"lr": hp_choice([0.01, 0.001]), "batch_size": hp_choice([16, 64])},
            num_epochs=3,
            validation=0.25,
            verbose=1,
        )
        result = search.fit(df)
        for model in result.get_all_models():
            print(model.trained(), {n: round(v[-1], 3) for n, v in model.getHistory().items()})
        print("best:", result.get_best_model().trained(), result.get_best_model_history())
        result.set_output_columns(["scores"]).transform(df).select("label", "scores").show(3)
    spark.stop()


if __name__ == "__main__":
    main()
