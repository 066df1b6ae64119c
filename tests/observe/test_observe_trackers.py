"""Trackers against the real packages, read back; each is given a real run."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from cerebro_hydra import MLflowTracker, TensorBoardTracker
from cerebro_hydra.errors import DataError
from cerebro_hydra.observe import Decision, RunEnded
from cerebro_hydra.observe.report import render
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.tune import SearchResult
from tests.observe.conftest import begin

pytest.importorskip("tensorboard", reason="tensorboard is not installed")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

pytestmark = pytest.mark.slow


@pytest.fixture
def flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow, whose runs lie in files."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    return mlflow.MlflowClient((tmp_path / "mlruns").as_uri())


def mlflow_tracker(flow: Any, experiment: str) -> MLflowTracker:
    return MLflowTracker(experiment, flow.tracking_uri)


def runs_of(flow: Any, experiment: str) -> list[Any]:
    runs: list[Any] = flow.search_runs([flow.get_experiment_by_name(experiment).experiment_id])
    return runs


def tell(trackers: Iterable[Any], begun: list[Any], *instructions: Any, ends: bool = False) -> None:
    """Let trackers observe a run with these instructions, one after another."""
    told = [
        Decision(seq, float(seq + 1), ev.TrialStopped(0, ""), (each,))
        for seq, each in enumerate(instructions)
    ]
    for tracker in trackers:
        for record in [*begun, *told, *([RunEnded(1.0)] if ends else [])]:
            tracker.on_record(record)


def scalars(path: Path, name: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(path))
    read.Reload()
    return [(point.step, point.value) for point in read.Scalars(name)]


def test_tensorboard_has_a_run_per_trial(result: SearchResult, tmp_path: Path) -> None:
    result.export_to(TensorBoardTracker(tmp_path))
    best = result.best_trial
    for name, values in best.history.items():
        read = scalars(tmp_path / result.document.run_id / best.trial_id, name)
        assert [step for step, _ in read] == [1, 2, 3]
        assert [value for _, value in read] == pytest.approx(values)
    ends = []
    for trial in result.trials:
        read = EventAccumulator(str(tmp_path / result.document.run_id / trial.trial_id))
        read.Reload()
        summary = read.SummaryMetadata(metadata.SESSION_START_INFO_TAG)
        start = metadata.parse_session_start_info_plugin_data(summary.plugin_data.content)
        assert {k: v.string_value for k, v in start.hparams.items()} == trial.params
        end = read.SummaryMetadata(metadata.SESSION_END_INFO_TAG).plugin_data.content
        ends.append(metadata.parse_session_end_info_plugin_data(end).status)
    assert ends == [1, 2, 2, 1]  # success; failure in training, at admission; success


def test_tensorboard_forgets_epochs_that_were_trained_again(tmp_path: Path) -> None:
    told = [
        ins.EndEpoch(0, 0, {"val_loss": 3.0}),
        ins.EndEpoch(0, 1, {"val_loss": 2.0}),
        ins.Redo(0, (4,), "its only holder was lost"),
        ins.EndEpoch(0, 1, {"val_loss": 1.0}),
    ]
    begun = begin(1)
    tell([TensorBoardTracker(tmp_path)], begun, *told, ends=True)
    folder = tmp_path / begun[0].document.run_id / "trial-000"
    assert scalars(folder, "val_loss") == [(1, 3.0), (2, 1.0)]


def test_trackers_go_on_with_a_trial_whose_budget_was_extended(tmp_path: Path, flow: Any) -> None:
    told = [
        ins.EndEpoch(0, 0, {"val_loss": 3.0}),
        ins.FinishTrial(0, "finished", "", 2),
        ins.ReopenTrial(0),
        ins.EndEpoch(0, 1, {"val_loss": 2.0}),
        ins.FinishTrial(0, "finished", "", 4),
    ]
    begun = begin(1)
    tell([TensorBoardTracker(tmp_path), mlflow_tracker(flow, "longer")], begun, *told)
    folder = tmp_path / begun[0].document.run_id / "trial-000"
    assert scalars(folder, "val_loss") == [(1, 3.0), (2, 2.0)]
    (trial,) = (run for run in runs_of(flow, "longer") if run.info.run_name == "trial-000")
    logged = flow.get_metric_history(trial.info.run_id, "val_loss")
    assert [(each.step, each.value) for each in logged] == [(1, 3.0), (2, 2.0)]


def test_trackers_log_the_epochs_that_a_fork_has_from_its_parent(tmp_path: Path, flow: Any) -> None:
    told = [
        ins.EndEpoch(0, 0, {"val_loss": 3.0}),
        ins.EndEpoch(0, 1, {"val_loss": 2.0}),
        ins.ForkState(1, 0, 4),
        ins.EndEpoch(0, 2, {"val_loss": 9.0}),
        ins.EndEpoch(1, 2, {"val_loss": 1.0}),
    ]
    begun = begin(2)
    tell([TensorBoardTracker(tmp_path), mlflow_tracker(flow, "forks")], begun, *told)
    expected = [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert scalars(tmp_path / begun[0].document.run_id / "trial-001", "val_loss") == expected
    (fork,) = (run for run in runs_of(flow, "forks") if run.info.run_name == "trial-001")
    logged = flow.get_metric_history(fork.info.run_id, "val_loss")
    assert [(each.step, each.value) for each in logged] == expected


def test_trackers_log_the_rungs_at_which_a_trial_was_compared(tmp_path: Path, flow: Any) -> None:
    pauses = [ev.TrialPaused(0, 1), ev.TrialResumed(0), ev.TrialPaused(0), ev.TrialPaused(0, 3)]
    told = [Decision(seq, float(seq + 1), each, ()) for seq, each in enumerate(pauses)]
    begun = begin(1)
    for tracker in (TensorBoardTracker(tmp_path), mlflow_tracker(flow, "rungs")):
        for record in [*begun, *told]:
            tracker.on_record(record)
    expected = [(1, 1.0), (3, 3.0)]
    assert scalars(tmp_path / begun[0].document.run_id / "trial-000", "rung") == expected
    (trial,) = (run for run in runs_of(flow, "rungs") if run.info.run_name == "trial-000")
    logged = flow.get_metric_history(trial.info.run_id, "rung")
    assert [(each.step, each.value) for each in logged] == expected


def test_tensorboard_keeps_no_file_and_no_thread_of_a_trial_that_is_over(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    started, *admitted = begin(5)
    tracker.on_record(started)
    threads = threading.active_count()
    for seq, record in enumerate(admitted):
        told = (ins.EndEpoch(seq, 0, {"val_loss": 1.0}), ins.FinishTrial(seq, "finished", "", 2))
        tell([tracker], [record], *told)
    assert threading.active_count() == threads
    tracker.on_record(RunEnded(1.0))
    folder = tmp_path / started.document.run_id
    assert all(scalars(folder / f"trial-{n:03d}", "val_loss") == [(1, 1.0)] for n in range(5))


def test_a_tracker_takes_one_search_after_another(
    tmp_path: Path, flow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro_hydra.observe.trackers.render", lambda folder: "")
    trackers = TensorBoardTracker(tmp_path / "board"), mlflow_tracker(flow, "two")
    for value, run_id in enumerate(("first", "second")):
        begun = begin(1, run_id=run_id, store=LocalStore(str(tmp_path / run_id)).to_dict())
        tell(trackers, begun, ins.EndEpoch(0, 0, {"val_loss": float(value)}), ends=True)
        assert scalars(tmp_path / "board" / run_id / "trial-000", "val_loss") == [(1, value)]
    runs = runs_of(flow, "two")
    parents = {run.info.run_id: run.info.run_name for run in runs}
    trials = [run for run in runs if run.info.run_name == "trial-000"]
    assert {
        parents[run.data.tags["mlflow.parentRunId"]]: run.data.metrics["val_loss"] for run in trials
    } == {"first": 0.0, "second": 1.0}


def test_mlflow_has_a_parent_and_a_run_per_trial(
    result: SearchResult, folder: RunFolder, tmp_path: Path, flow: Any
) -> None:
    import mlflow

    result.export_to(mlflow_tracker(flow, "digits"))
    runs = {run.info.run_name: run for run in runs_of(flow, "digits")}
    parent = runs.pop(result.document.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["best_trial"] == result.best_trial.trial_id
    assert {r.data.tags["mlflow.parentRunId"] for r in runs.values()} == {parent.info.run_id}
    by_id = {trial.trial_id: trial for trial in result.trials}
    assert len(runs) == 4
    for name, run in runs.items():
        trial = by_id[name]
        assert run.data.params == trial.params
        assert run.info.status == {"finished": "FINISHED", "failed": "FAILED"}[trial.status]
        for metric, values in trial.history.items():
            logged = flow.get_metric_history(run.info.run_id, metric)
            assert [(m.step, m.value) for m in logged] == list(enumerate(values, start=1))
    failed = next(run for name, run in runs.items() if by_id[name].status == "failed")
    assert [each.path for each in flow.list_artifacts(failed.info.run_id)] == ["traceback.txt"]
    location = flow.download_artifacts(parent.info.run_id, "model", str(tmp_path))
    features = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    expected = result.get_best_model().torch()(torch.from_numpy(features)).detach()
    exported = mlflow.pytorch.load_model(location)
    assert torch.equal(exported(torch.from_numpy(features)).detach(), expected)
    predictor = mlflow.pyfunc.load_model(location)
    for data in (features, {"features": features}, pd.DataFrame({"features": list(features)})):
        assert np.array_equal(predictor.predict(data), expected.numpy())
    with pytest.raises(DataError, match="column 'features' is not in the table"):
        predictor.predict(pd.DataFrame({"pixels": list(features)}))
    assert not [each for each in Path(location).rglob("*") if each.suffix in (".pkl", ".pth")]
    report = flow.download_artifacts(parent.info.run_id, "report.html", str(tmp_path))
    assert Path(report).read_text(encoding="utf-8") == render(folder)


@pytest.mark.parametrize(
    "name", ["a[0]@b", "a/../b", "..", "/a", "./a", "a//b", "x" * 300, "\ud800"]
)
def test_trackers_take_any_name_and_value(name: str, tmp_path: Path, flow: Any) -> None:
    params = {name: f"\ud800{name}"}
    begun = begin(1, metrics={"loss": "min", name: "max"}, params=params)
    trackers = mlflow_tracker(flow, "any"), TensorBoardTracker(tmp_path)
    tell(trackers, begun, ins.EndEpoch(0, 0, {f"val_{name}": 2.0}))
    (run,) = (each for each in runs_of(flow, "any") if each.info.run_name == "trial-000")
    assert list(run.data.params.values()) == [f"?{name}".replace("\ud800", "?")]
    assert list(run.data.metrics.values()) == [2.0]
