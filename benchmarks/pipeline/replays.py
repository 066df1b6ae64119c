"""Trains every kind of model by every schedule on local Spark, and compares each with a replay."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cerebro_hydra
from cerebro_hydra import SparkBackend, local_spark
from cerebro_hydra.observe import RunView
from cerebro_hydra.plan.schedules.registry import SCHEDULES
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import RunFolder
from tests.end_to_end.queues.mixed_searches import dataframe
from tests.end_to_end.queues.test_pipelines import pipelined
from tests.end_to_end.runs import grid

MODELS = ("mlp", "resnet", "bert", "gpt2", "llama")
DEVICES = (2, 3)
ROWS, BLOCKS, SHARDS = 20, 5, 6
ROOM = 520_000  # bytes of a device that spills, which holds a shard of each model with its tasks


def trial(params: dict[str, Any]) -> Recipe:
    """Build a trial; a weight that two stages of PipeDream read has one version in sync alone."""
    given = {"blocks": BLOCKS, "shards": SHARDS, **params}
    if params["schedule"] == "pipedream":
        given["vertical_sync"] = params["model"] == "gpt2"
    return pipelined(given)


def search(spark: Any, devices: int, room: int | None, models: tuple[str, ...]) -> Iterator[str]:
    """Train every combination in one search, and yield a row for each model and what differs."""
    backend = SparkBackend(
        spark_context=spark.sparkContext, num_workers=1, devices_per_worker=devices,
        device_memory=room,
    )  # fmt: skip
    # A device that keeps activations keeps its shards, so it has no room to save.
    recompute = [True, False] if room is None else [True]
    space = {"model": models, "schedule": list(SCHEDULES), "recompute": recompute}
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        result = grid(
            backend, Path(folder), trial, space, num_epochs=1, evaluation_metric="loss"
        ).fit(dataframe(spark, ROWS))
        spent = time.perf_counter() - begun
        verdicts: dict[tuple[str, str], list[str]] = {}
        for each in result.trials:
            verdict = each.status if each.error is None else f"{each.status}: {each.error}"
            if each.status == "finished":
                report = cerebro_hydra.replay(result.run_path, each.trial_id)
                verdict = "identical" if report.identical else str(report)
            verdicts.setdefault((each.params["model"], each.params["schedule"]), []).append(verdict)
            if verdict != "identical":
                yield f"{each.trial_id} {each.params}: {verdict}"
        view = RunView.of_run(RunFolder.open(result.run_path))
        spilled = sum(used.spilled for used in view.devices.values())
    for model in models:
        cells = [verdicts[model, name].count("identical") for name in SCHEDULES]
        told = " | ".join(f"{n} of {len(recompute)}" for n in cells)
        yield f"| {devices} | {'no limit' if room is None else room} | {model} | {told} |"
    yield f"{len(result.trials)} trials in {spent:.0f} s; devices spilled {spilled / 1e6:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, choices=DEVICES, help="only with so many devices")
    parser.add_argument("--model", choices=MODELS, help="only this model")
    parser.add_argument("--room", type=int, default=ROOM, help="bytes of a device that spills")
    given = parser.parse_args()
    models = (given.model,) if given.model else MODELS
    spark = local_spark(workers=1)
    spark.sparkContext.setLogLevel("ERROR")
    for devices in (given.devices,) if given.devices else DEVICES:
        for room in (given.room, None):
            for line in search(spark, devices, room, models):
                print(line, flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
