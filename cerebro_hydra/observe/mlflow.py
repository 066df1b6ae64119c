"""Logs a run to MLflow: a parent run for the search, and below it one run per trial."""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro_hydra.errors import SetupError
from cerebro_hydra.foreign_text import error_text
from cerebro_hydra.observe.records import (
    Decision,
    Record,
    RunEnded,
    RunStarted,
    TrialAdmitted,
    unfolded,
)
from cerebro_hydra.observe.report import REPORT_FILE, render
from cerebro_hydra.observe.text import utf8
from cerebro_hydra.observe.view import RunView, TrialView
from cerebro_hydra.plan.messages.events import TrialPaused, TrialRefused
from cerebro_hydra.plan.messages.instructions import EndEpoch, FinishTrial, ForkState, Instruction
from cerebro_hydra.storage.run_document import RunDocument
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.storage.store import Store

LONGEST_PARAM = 6000
"""The most characters that MLflow takes for a parameter."""

LONGEST_NAME = 250

MODEL = "model"
"""The artifact of the search's run that is its best model: `runs:/<run id>/model`."""

ENDS = {"finished": "FINISHED", "failed": "FAILED"}


class MLflowTracker:
    """Logs parameters, metrics by epoch, rungs, how trials end, the report, the best model.

    `mlflow.pytorch.load_model` and `mlflow.pyfunc.load_model` load the best model from
    `runs:/<id of the search's run>/model`, without its source. Neither file of it is a pickle.

    Your own active MLflow run, if there is one, is left alone. Characters that MLflow refuses in
    the name of a parameter or metric become "_".

    Args:
        experiment: name of the experiment, which is created if it does not exist.
        tracking_uri: where MLflow keeps runs; None takes MLflow's own setting.

    Raises:
        SetupError: mlflow is not installed.
    """

    def __init__(self, experiment: str = "cerebro_hydra", tracking_uri: str | None = None) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise SetupError(
                "MLflowTracker needs mlflow; install it with pip install 'cerebro-hydra[mlflow]'"
            ) from error
        self._client: Any = MlflowClient(tracking_uri=tracking_uri)
        self._experiment = experiment

    def on_record(self, record: Record) -> None:
        """Log the epochs and ends that a record tells of; another search may follow."""
        for each in unfolded(record):
            self._take(each)

    def _take(self, record: Record) -> None:
        if isinstance(record, RunStarted):
            self._view = RunView()
        self._view.apply(record)
        match record:
            case RunStarted(document):
                self._start(document)
            case TrialAdmitted(spec):
                self._admit(self._view.trials[spec.trial])
            case Decision():
                now = round(1000 * record.time)
                match record.event:
                    case TrialRefused(index):
                        self._admit(self._view.trials[index])
                    case TrialPaused(index, int(rung)) if not self._view.trials[index].over:
                        self._measured(index, {rung - 1: {"rung": rung}}, now)
                for instruction in record.instructions:
                    self._instruction(instruction, now)
            case RunEnded():
                self._finish()

    def _start(self, document: RunDocument) -> None:
        found = self._client.get_experiment_by_name(self._experiment)
        self._place = (
            found.experiment_id if found else self._client.create_experiment(self._experiment)
        )
        settings = {
            "num_epochs": document.num_epochs,
            "evaluation_metric": document.evaluation_metric,
            "order": document.order,
            "seed": document.seed,
        }
        self._parent = self._create(document.run_id, {}, settings)
        self._runs = dict[int, str]()

    def _admit(self, trial: TrialView) -> None:
        tags = {"mlflow.parentRunId": self._parent}
        self._runs[trial.trial] = self._create(trial.trial_id, tags, trial.params)

    def _create(self, name: str, tags: dict[str, str], params: Any) -> str:
        from mlflow.entities import Param

        run = self._client.create_run(self._place, run_name=name, tags=tags)
        logged = [
            Param(allowed(key), utf8(str(value))[:LONGEST_PARAM]) for key, value in params.items()
        ]
        self._client.log_batch(run.info.run_id, params=logged)
        return str(run.info.run_id)

    def _instruction(self, instruction: Instruction, now: int) -> None:
        match instruction:
            case EndEpoch(index, epoch, values):
                self._measured(index, {epoch: values}, now)
            case ForkState(index):
                self._measured(index, self._view.trials[index].epochs, now)  # its parent's
            case FinishTrial(index):
                self._end(self._view.trials[index], now)

    def _measured(self, index: int, epochs: Mapping[int, Mapping[str, float]], now: int) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(allowed(name), value, now, epoch + 1)
            for epoch, values in sorted(epochs.items())
            for name, value in values.items()
        ]
        self._client.log_batch(self._runs[index], metrics=metrics)

    def _end(self, trial: TrialView, now: int | None = None) -> None:
        run = self._runs[trial.trial]
        if trial.status == "failed":
            self._client.log_text(run, utf8(trial.reason), "traceback.txt")
        self._client.set_terminated(run, ENDS.get(trial.status, "KILLED"), end_time=now)

    def _finish(self) -> None:
        from mlflow.entities import Metric, RunTag

        view, document = self._view, self._view.document
        unended = [view.trials[number] for number in self._runs if not view.trials[number].over]
        for trial in unended:
            self._end(trial)
        best = view.winner
        if best is not None and best.result_epoch is not None:
            metric = Metric(allowed(view.metric), view.score(best), 0, best.result_epoch + 1)
            tags = [RunTag("best_trial", best.trial_id)]
            self._client.log_batch(self._parent, metrics=[metric], tags=tags)
        folder = RunFolder(Store.from_dict(dict(document.store)), document.run_id)
        self._client.log_text(self._parent, render(folder), REPORT_FILE)
        if best is not None:
            self._log_model(folder, best.trial_id)
        self._client.set_terminated(self._parent, "KILLED" if unended else "FINISHED")

    def _log_model(self, folder: RunFolder, trial_id: str) -> None:
        """Log the archive that the run keeps of its best model, which needs no source."""
        from cerebro_hydra.observe.mlflow_model import write_mlflow_model
        from cerebro_hydra.shards.export.archive import archived

        archive = archived(folder, trial_id)
        if archive is None:  # the model needs its source, or the run was interrupted
            return
        with tempfile.TemporaryDirectory(prefix="cerebro-hydra-mlflow-") as scratch:
            try:
                write_mlflow_model(archive, Path(scratch, MODEL))
            except Exception as error:
                reason = utf8(f"{type(error).__name__}: {error_text(error)}")[:LONGEST_PARAM]
                self._client.set_tag(self._parent, "model_not_logged", reason)
            else:
                self._client.log_artifacts(self._parent, str(Path(scratch, MODEL)), MODEL)


def allowed(name: str) -> str:
    """Return the name of a parameter or metric with "_" for what MLflow refuses."""
    name = re.sub(r"[^\w\-. :/]", "_", name)[:LONGEST_NAME]
    # MLflow takes names that are normalised relative paths.
    if posixpath.normpath(name) != name or name.startswith((".", "/")):
        name = name.replace("/", "_").lstrip(".") or "_"
    return name
