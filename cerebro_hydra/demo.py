"""The demo trains eight models over scikit-learn's digits in Spark, then replays each.

Each trial is Hydra's own check workload, a feed-forward network of 1.2 million parameters, cut into
three shards that hop between two workers.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule

from cerebro_hydra.errors import SetupError
from cerebro_hydra.observe.text import parameters
from cerebro_hydra.observe.view import human_bytes
from cerebro_hydra.temporary_folders import temporary_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from cerebro_hydra.ml import SparkEstimator
    from cerebro_hydra.tune.result import SearchResult

HELD_OUT_ROWS = 360
SPLIT_SEED = 0
LEAST_ACCURACY = 0.95
EPOCHS = 5
"""After as many the winner must have that accuracy."""


def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
    """Build a net of 64 pixels, two hidden layers of 1060 units, 10 digits."""
    import torch
    from torch import nn

    from cerebro_hydra.ml import SparkEstimator

    model = nn.Sequential(
        nn.Linear(64, 1060), nn.ReLU(), nn.Linear(1060, 1060), nn.ReLU(), nn.Linear(1060, 10)
    )
    model[0].requires_grad_(not params["freeze_first"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=params["batch_size"],
        shards=3,
        lr_scheduler=halved_each_epoch,
    )


def halved_each_epoch(optimizer: Optimizer, steps_per_epoch: int) -> LRScheduler:
    """Let the learning rate fall a little in every step, to half in an epoch."""
    from torch.optim.lr_scheduler import ExponentialLR

    return ExponentialLR(optimizer, gamma=0.5 ** (1 / steps_per_epoch))


def run(epochs: int = EPOCHS, workers: int = 2, keep: str | None = None) -> int:
    """Run the demo; return 0 if the winner is good enough and every replay is identical.

    Args:
        epochs: passes over the training rows.
        workers: agents, and partitions of the rows.
        keep: a folder for the store, which stays; None takes a temporary one.
    """
    console = Console(highlight=False)
    begun = time.perf_counter()
    store = nullcontext(keep) if keep is not None else temporary_folder("demo")
    with store as folder:
        passed = _play(console, folder, epochs, workers)
    console.print()
    if keep is not None:
        console.print(f"Everything is kept in {keep}", soft_wrap=True)
    console.print(
        f"{'Done' if passed else 'FAILED'} in {time.perf_counter() - begun:.0f} s.",
        style="bold green" if passed else "bold red",
    )
    return 0 if passed else 1


def _play(console: Console, folder: str, epochs: int, workers: int) -> bool:
    """Play five scenes; return whether the winner is good and every replay identical."""
    import cerebro_hydra
    from cerebro_hydra.tune.result import print_replays

    console.print(
        "cerebro_hydra trains many PyTorch models over one partitioned Spark DataFrame. "
        "The rows stay where they are; the models hop from worker to worker, shard by shard."
    )
    _title(console, "1. A DataFrame")
    spark = cerebro_hydra.local_spark(workers=workers)
    try:
        train, held_out = digits(spark)
        console.print(
            f"scikit-learn's digits, 64 pixels each; {HELD_OUT_ROWS} rows are held out. "
            f"Spark runs on this machine with {workers} workers, one partition each."
        )
        _title(console, "2. Eight models, each cut into three shards")
        console.print(
            "2 learning rates x 2 batch sizes x first layer frozen or not, "
            f"{epochs} epochs. First each model is cut and checked against the uncut one:"
        )
        result = _train(spark, train, folder, epochs, workers)
        _title(console, "3. What the hops cost")
        totals = result.totals
        console.print(
            f"{totals.hops} hops between workers moved {human_bytes(totals.bytes_moved)} between "
            f"their processes, {1000 * totals.seconds_per_hop:.0f} ms each on average. "
            f"{human_bytes(totals.bytes_saved)} were not sent, because the receiver had the same "
            "bytes already: frozen layers, which all trials share."
        )
        _title(console, "4. The winner")
        good = _tell_winner(console, result, held_out, epochs)
    finally:
        spark.stop()
    _title(console, "5. The proof")
    console.print(
        "Now each trial trains again in plain PyTorch, in one process, without shards or hops, "
        "along the partitions that it visited. Parameters, optimizer state and metrics must "
        "agree in every bit:"
    )
    return print_replays(console, result.run_path) and good


def _train(
    spark: SparkSession, train: DataFrame, folder: str, epochs: int, workers: int
) -> SearchResult:
    from cerebro_hydra import GridSearch, LocalStore, SparkBackend, hp_choice

    # Agents find a factory by its module's name, which is another in `python -m`.
    from cerebro_hydra.demo import estimator_gen_fn as factory

    search = GridSearch(
        backend=SparkBackend(spark_context=spark.sparkContext, num_workers=workers),
        store=LocalStore(prefix_path=folder),
        estimator_gen_fn=factory,
        search_space={
            "lr": hp_choice([3e-3, 1e-3]),
            "batch_size": hp_choice([32, 64]),
            "freeze_first": hp_choice([True, False]),
        },
        num_epochs=epochs,
        evaluation_metric="accuracy",
        validation=0.2,
        feature_columns=["features"],
        label_columns=["label"],
        seed=0,
    )
    return search.fit(train)


def _tell_winner(console: Console, result: SearchResult, held_out: DataFrame, epochs: int) -> bool:
    """Tell how good the winner is; return whether that is enough for so many epochs."""
    best = result.best_trial
    validated = best.result_metrics["val_accuracy"]
    accuracy = accuracy_of(result.set_output_columns(["prediction"]).transform(held_out))
    console.print(
        f"{best.trial_id} ({parameters(best.params)}): accuracy {validated:.1%} on validation rows."
    )
    reached, enough = accuracy >= LEAST_ACCURACY, True
    told = f"On the {HELD_OUT_ROWS} held-out rows, through result.transform(df): {accuracy:.1%}"
    if not reached and epochs < EPOCHS:
        told += f"; {LEAST_ACCURACY:.0%} is asked for only after {EPOCHS} epochs or more"
    elif not reached:
        told, enough = f"{told}, and it should be at least {LEAST_ACCURACY:.0%}", False
    console.print(told, style="bold green" if enough else "bold red")
    return enough


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Rule(f"[bold]{text}[/bold]", align="left", style="cyan"))


def digits(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    """Return scikit-learn's digits as (train, held-out) DataFrames, split by a fixed seed.

    Columns: `features`, 64 pixels from 0 to 1, and `label`, the digit.

    Raises:
        SetupError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SetupError(
            "the demo needs scikit-learn for its data; install it with "
            "pip install 'cerebro-hydra[demo]'"
        ) from error

    import pandas as pd

    pixels, labels = load_digits(return_X_y=True)
    table = pd.DataFrame({"features": list(pixels.astype("float32") / 16), "label": labels})
    table = table.sample(frac=1, random_state=SPLIT_SEED)
    schema = "features array<float>, label long"
    return (
        spark.createDataFrame(table[HELD_OUT_ROWS:], schema),
        spark.createDataFrame(table[:HELD_OUT_ROWS], schema),
    )


def accuracy_of(predicted: DataFrame) -> float:
    """Return the share of rows whose largest output in `prediction` is that of `label`."""
    rows = predicted.select("label", "prediction").collect()
    hits = sum(row.prediction.index(max(row.prediction)) == row.label for row in rows)
    return hits / len(rows)
