"""Runs on the cluster: the doctor, a grid with one agent killed, a replay of every trial.

Run by spark-submit: job.py STORE REPORT
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

import cerebro_hydra
from cerebro_hydra import GridSearch, LocalStore, SparkBackend, SparkEstimator, hp_choice
from cerebro_hydra.observe import REPORT_FILE, AgentStarted, Decision, Record
from cerebro_hydra.plan.messages.events import SubEpochDone


def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
    """Return a small network, and print which GPUs CUDA would show it."""
    import os

    import torch
    from torch import nn

    from cerebro_hydra import SparkEstimator

    print("GPUS", os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=16,
        shards=2,
    )


class KillsOneAgent:
    """Kills the first worker's agent with SIGKILL once a sub-epoch is done, as an observer."""

    def __init__(self) -> None:
        self.agents: dict[int, AgentStarted] = {}  # the latest of each worker
        self.killed: int | None = None

    def on_record(self, record: Record) -> None:
        """Take in one record of the run."""
        match record:
            case AgentStarted(worker):
                self.agents[worker] = record
            case Decision(event=SubEpochDone()) if self.killed is None and 0 in self.agents:
                self.killed = self.agents[0].pid
                os.kill(self.killed, signal.SIGKILL)


def where(rows: Any) -> Any:
    """Return, on an executor, the path from which it imported cerebro_hydra."""
    import cerebro_hydra

    for _ in rows:
        pass
    yield cerebro_hydra.__file__


def main(store: Path, report: Path) -> None:
    """Run the whole job and write its findings as JSON."""
    spark = SparkSession.builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    found = cerebro_hydra.doctor(spark, num_workers=2, store=str(store))
    print(found, flush=True)
    origins = spark.sparkContext.parallelize(range(2), 2).mapPartitions(where).collect()

    random = np.random.default_rng(3)
    labels = random.integers(0, 4, 400)
    features = random.normal(size=(400, 16)) + labels[:, None] / 2
    rows = [(f.tolist(), int(y)) for f, y in zip(features, labels, strict=True)]
    df = spark.createDataFrame(rows, "features array<double>, label long")
    killer = KillsOneAgent()
    result = GridSearch(
        backend=SparkBackend(spark, num_workers=2),
        store=LocalStore(str(store)),
        estimator_gen_fn=estimator_gen_fn,
        search_space={"lr": hp_choice([0.01, 0.003])},
        num_epochs=3,
        evaluation_metric="accuracy",
        observers=[killer],
    ).fit(df)
    replays = {
        trial.trial_id: cerebro_hydra.replay(
            result.run_path, trial.trial_id, factory=estimator_gen_fn
        ).identical
        for trial in result.trials
    }
    out = result.set_output_columns(["prediction"]).transform(df)
    report.write_text(
        json.dumps(
            {
                "doctor": {"ok": found.ok, "findings": [str(f) for f in found.findings]},
                "network": found["network"].seen,
                "driver_found_package_in": cerebro_hydra.__file__,
                "executors_found_package_in": origins,
                "status": [trial.status for trial in result.trials],
                "accuracy": [trial.history["val_accuracy"][-1] for trial in result.trials],
                "replay_identical": replays,
                "killed": killer.killed,
                "workers": {
                    number: {"pid": agent.pid, "gpus": agent.gpus}
                    for number, agent in killer.agents.items()
                },
                "predicted_rows": out.count(),
                "report": Path(result.run_path, REPORT_FILE).is_file(),
            }
        )
    )
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
