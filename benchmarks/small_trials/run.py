"""Measures what a sub-epoch costs beside its training, in a search of many tiny trials."""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from cerebro_hydra import (
    LocalStore,
    RandomSearch,
    SparkBackend,
    SparkEstimator,
    hp_choice,
    hp_uniform,
    local_spark,
)
from cerebro_hydra.data.manifest import ColumnSpec, Manifest, PartitionInfo
from cerebro_hydra.hopper.coordinator import Coordinator
from cerebro_hydra.observe import AgentStarted, Decision, Record, ReportWriter, RunStarted
from cerebro_hydra.plan.messages.events import EvaluationDone, SubEpochDone
from cerebro_hydra.plan.messages.instructions import FinishRun, StartSubEpoch
from cerebro_hydra.storage.run_document import RUN_FILE
from cerebro_hydra.storage.run_folder import RunFolder
from tests.hopper.scripted_agents import ScriptedLauncher
from tests.hopper.scripted_runs import GivenTrials, described, no_factory

ROWS, FEATURES, EPOCHS = 1200, 8, 2
# Java that is made ready at once and never made fast: a third less CPU time for so short a run.
QUICK_JAVA = "-XX:TieredStopAtLevel=1"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Moment:
    """Holds the wall time and the CPU seconds of the driver and of all agents up to now."""

    wall: float
    driver: float
    agents: float


@dataclass
class Meter:
    """Notes when a run begins, trains first and ends, and the seconds that agents measured."""

    pids: set[int] = field(default_factory=set)
    admitted: Moment | None = None
    begun: Moment | None = None
    ended: Moment | None = None
    busy: float = 0.0

    def on_record(self, record: Record) -> None:
        """Take in one record of the run."""
        match record:
            case RunStarted():
                self.admitted = self.moment()
            case AgentStarted():
                self.pids.add(record.pid)
            case Decision():
                if isinstance(record.event, SubEpochDone | EvaluationDone):
                    self.busy += record.event.seconds
                kinds = {type(each) for each in record.instructions}
                if StartSubEpoch in kinds and self.begun is None:
                    self.begun = self.moment()
                if FinishRun in kinds:  # the agents are still there
                    self.ended = self.moment()

    def moment(self) -> Moment:
        """Return the present."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        agents = sum(cpu_seconds(pid) for pid in self.pids)
        return Moment(time.monotonic(), used.ru_utime + used.ru_stime, agents)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@dataclass(frozen=True)
class Figures:
    """Holds the figures of one search; milliseconds are those of one sub-epoch."""

    trials: int
    workers: int
    admission_ms_per_trial: float
    admission_cpu_ms_per_trial: float
    wall_seconds: float
    driver_cpu_ms: float
    agents_cpu_ms: float
    measured_ms: float
    overhead_ms: float
    journal_files: int
    fit_seconds: float


def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
    """Return a tiny net, of one of two widths."""
    model = nn.Sequential(
        nn.Linear(FEATURES, params["width"]), nn.ReLU(), nn.Linear(params["width"], 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"])
    return SparkEstimator(model=model, optimizer=optimizer, loss=nn.MSELoss(), batch_size=64)


def search(trials: int, workers: int) -> Figures:
    """Run a search on a local Spark and return its figures."""
    spark = local_spark(workers=workers)
    random = np.random.default_rng(0)
    features = random.normal(size=(ROWS, FEATURES)).astype("float32")
    labels = features.sum(axis=1, keepdims=True)
    table = pd.DataFrame({"features": list(features), "label": list(labels)})
    df = spark.createDataFrame(table, "features array<float>, label array<float>")
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        chosen = RandomSearch(
            backend=SparkBackend(spark_context=spark, num_workers=workers),
            store=LocalStore(prefix_path=folder),
            estimator_gen_fn=estimator_gen_fn,
            search_space={"lr": hp_uniform(1e-4, 1e-2), "width": hp_choice([8, 16])},
            num_models=trials,
            num_epochs=EPOCHS,
            validation=0.25,
            verbose=0,
            observers=[meter],
        )
        prepared = chosen.backend.prepare(chosen.store, df, chosen.data_spec, print)
        started = meter.moment()
        result = chosen.fit_on_prepared_data(prepared)
        over = time.monotonic()  # the agents are gone
        files = sum(1 for _ in RunFolder.open(result.run_path).read_segments())
        assert all(trial.status == "finished" for trial in result.trials)
    spark.stop()
    assert meter.admitted is not None and meter.begun is not None and meter.ended is not None
    sub_epochs = trials * workers * EPOCHS
    wall = meter.ended.wall - meter.begun.wall
    return Figures(
        trials,
        workers,
        1e3 * (meter.admitted.wall - started.wall) / trials,
        1e3 * (meter.admitted.driver - started.driver) / trials,
        wall,
        1e3 * (meter.ended.driver - meter.begun.driver) / sub_epochs,
        1e3 * (meter.ended.agents - meter.begun.agents) / sub_epochs,
        1e3 * meter.busy / sub_epochs,
        1e3 * (wall * workers - meter.busy) / sub_epochs,
        files,
        over - started.wall,
    )


def coordinator_alone(trials: int, workers: int) -> float:
    """Return the coordinator's CPU milliseconds per sub-epoch, with agents that train nothing."""
    partitions = tuple(
        PartitionInfo(split, index, 5, 0, f"{split}/partition={index:05d}")
        for split in ("train", "val")
        for index in range(workers)
    )
    data = Manifest("f" * 8, (ColumnSpec("x", "float32", (2,)),), partitions)
    doc, specs = described(trials, workers, EPOCHS)
    with tempfile.TemporaryDirectory() as store:
        folder = RunFolder(LocalStore(store), doc.run_id)
        folder.write_json(RUN_FILE, doc.to_json())
        for spec in specs:
            folder.write_trial(spec)
        launcher = ScriptedLauncher(workers)
        begun = time.thread_time()  # of this thread alone: it takes and journals every decision
        Coordinator(
            folder,
            doc,
            GivenTrials(specs, EPOCHS),
            launcher,
            no_factory,
            manifest=data,
            observers=[ReportWriter(folder)],
        ).run()
        return 1e3 * (time.thread_time() - begun) / (trials * workers * EPOCHS)


def main() -> None:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--coordinator", action="store_true", help="without Spark, with scripted agents"
    )
    parser.add_argument("--quick", action="store_true", help="only see that both run: 4 trials")
    arguments = parser.parse_args()
    if arguments.quick:
        os.environ["JAVA_TOOL_OPTIONS"] = QUICK_JAVA
        arguments.trials, arguments.workers = 4, 2
    if arguments.coordinator or arguments.quick:
        milliseconds = coordinator_alone(arguments.trials, arguments.workers)
        print(json.dumps({"trials": arguments.trials, "coordinator_cpu_ms": milliseconds}))
    if not arguments.coordinator:
        print(json.dumps(asdict(search(arguments.trials, arguments.workers)), indent=2))


if __name__ == "__main__":
    main()
