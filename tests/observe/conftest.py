"""Streams of records from the real state machine on its virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.observe import Decision, Record, RunEnded, RunStarted, RunView, TrialAdmitted
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import Hop, TrialAdded
from cerebro_hydra.plan.simulate.run import Overheads, Simulation, WorkerCrash
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.testing.local_backend import LocalBackend
from cerebro_hydra.tune import SearchResult
from tests.end_to_end.runs import classes, grid
from tests.observe import hostile
from tests.plan.closed_search import ClosedSearch

EPOCHS, PARTITIONS = 3, 2
DIGESTS = ("f" * 32, "e" * 32)
CRASHES = (
    WorkerCrash(0.5, 1, 0.2),
    WorkerCrash(2.25, 0, 0.1),
    WorkerCrash(4.0, 1, 1.0),
    WorkerCrash(6.6, 0, 3.0),
)
Simulate = Callable[..., tuple[Simulation, list[Record]]]


def begin(
    num_trials: int,
    validated: bool = True,
    patience: int | None = None,
    keep: str = "last",
    params: dict[str, Any] | None = None,
    **changes: Any,
) -> list[Record]:
    """The first records of a run."""
    fields: dict[str, Any] = {
        "run_id": "20260101-000000-abcdef", "factory": None, "seed": 0, "order": "dynamic",
        "num_epochs": EPOCHS, "num_partitions": PARTITIONS, "evaluation_metric": "loss",
        "metrics": {"loss": "min", "accuracy": "max"} if validated else {"loss": "min"},
        "feature_columns": ("features",), "label_columns": ("label",), "store": {},
        "fingerprint": "f" * 32, "validated": validated, "threads": 1,
    }  # fmt: skip
    records: list[Record] = [RunStarted(RunDocument(**{**fields, **changes}))]
    for trial in range(num_trials):
        spec = TrialSpec(
            trial=trial, trial_id=f"trial-{trial:03d}", seed=trial, cut={}, template={},
            params={"lr": 10.0**-trial} if params is None else params, nbytes=1_000_000,
            batch_size=32, accumulate=1, steps=(4, 4), shards=(DIGESTS,), patience=patience,
            keep=keep,
        )  # fmt: skip
        records.append(TrialAdmitted(spec))
    return records


def fold(records: Iterable[Record]) -> RunView:
    view = RunView()
    for record in records:
        view.apply(record)
    return view


def added(record: Record) -> TrialAdded:
    """The event that lets a trial of `begin` train."""
    assert isinstance(record, TrialAdmitted)
    return TrialAdded(TrialConfig(record.spec.trial, 1.0, 1_000_000, record.spec.shards), EPOCHS)


def written(path: Path, begun: Iterable[Record], *segments: Iterable[Decision]) -> RunFolder:
    """The folder of a run with these records."""
    started, *admitted = begun
    assert isinstance(started, RunStarted)
    folder = RunFolder(LocalStore(str(path)), started.document.run_id)
    folder.write_json("run.json", started.document.to_json())
    for each in admitted:
        assert isinstance(each, TrialAdmitted)
        folder.write_trial(each.spec)
    first: list[Any] = [{"run_id": folder.run_id, "config": {}}]
    for number, decisions in enumerate(segments):
        folder.write_segment(number, first + [decision.to_json() for decision in decisions])
        first = []
    return folder


@pytest.fixture
def simulate() -> Simulate:
    """`simulate(num_trials, ...)` gives a finished simulation and the records of its run."""

    def run(
        num_trials: int = 3,
        losses: tuple[WorkerCrash, ...] = (),
        validated: bool = True,
        patience: int | None = None,
        keep: str = "last",
        loss: Callable[[int, int], float] = lambda trial, epoch: 1.0,
    ) -> tuple[Simulation, list[Record]]:
        trials = tuple(
            TrialConfig(t, 1.0, 1_000_000, (DIGESTS,), patience=patience, keep=keep)
            for t in range(num_trials)
        )
        config = HopConfig(
            partitions=PARTITIONS,
            evaluate=validated,
            metric="val_loss" if validated else "train_loss",
        )
        workers = [(partition,) for partition in range(PARTITIONS)]
        simulation = Simulation(
            ClosedSearch(config, trials, EPOCHS),
            workers,
            lambda kind, trial, partition: 1.0 + 0.1 * trial,
            overheads=Overheads(hop=lambda trial, first: Hop(1_000_000, 0, 0.01)),
            crashes=losses,
            metric=loss,
        )
        timeline = simulation.run()
        started, *admitted = begin(num_trials, validated, patience, keep)
        records = [started]
        for seq, (event, instructions) in enumerate(timeline.records):
            if isinstance(event, TrialAdded):
                records.append(admitted[event.config.trial])
            records.append(Decision(seq, float(seq), event, tuple(instructions)))
        records.append(RunEnded(timeline.makespan))
        return simulation, records

    return run


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> SearchResult:
    """A real run of two workers, one of them killed; of four trials two finish."""
    backend, place = LocalBackend(2), tmp_path_factory.mktemp("store")
    space = {"fault": ["none", "raises", "refused", "no"], "note": [hostile.HOSTILE]}
    options = {"num_epochs": 3, "observers": [hostile.Killer(backend, after=5)]}
    return grid(backend, place, hostile.factory, space, **options).fit(classes(600))


@pytest.fixture(scope="session")
def folder(result: SearchResult) -> RunFolder:
    return RunFolder.open(result.run_path)
