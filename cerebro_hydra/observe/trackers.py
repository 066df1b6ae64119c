"""Logs a run to where teams keep theirs: MLflow, or event files of TensorBoard."""

from __future__ import annotations

import os
import posixpath
import re
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro_hydra.errors import SetupError
from cerebro_hydra.foreign_text import named_error_text
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
from cerebro_hydra.plan.messages.instructions import (
    EndEpoch,
    FinishTrial,
    ForkState,
    Instruction,
    Redo,
)
from cerebro_hydra.storage.local_paths import path_or_url
from cerebro_hydra.storage.run_document import RunDocument
from cerebro_hydra.storage.run_folder import RunFolder
from cerebro_hydra.storage.store import Store


class Tracker(ABC):
    """Tells of one run after another what is logged of it: trials, epochs, rungs, ends."""

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
                match record.event:
                    case TrialRefused(index):
                        self._admit(self._view.trials[index])
                    case TrialPaused(index, int(rung)) if not self._view.trials[index].over:
                        rungs = {rung - 1: {"rung": rung}}
                        self._measured(self._view.trials[index], rungs, record.time)
                for instruction in record.instructions:
                    self._instruction(instruction, record.time)
            case RunEnded():
                self._finish()

    def _instruction(self, instruction: Instruction, now: float) -> None:
        match instruction:
            case EndEpoch(index, epoch, values):
                self._measured(self._view.trials[index], {epoch: values}, now)
            case ForkState(index):
                fork = self._view.trials[index]
                self._measured(fork, fork.epochs, now)  # its parent's
            case Redo(index):
                self._redo(self._view.trials[index], now)
            case FinishTrial(index):
                self._end(self._view.trials[index], now)

    @abstractmethod
    def _start(self, document: RunDocument) -> None:
        """Begin with a run."""

    @abstractmethod
    def _admit(self, trial: TrialView) -> None:
        """Begin with a trial, which may have been refused."""

    @abstractmethod
    def _measured(
        self, trial: TrialView, epochs: Mapping[int, Mapping[str, float]], now: float
    ) -> None:
        """Log what a trial has measured, by the epoch, from 0, and the name."""

    def _redo(self, trial: TrialView, now: float) -> None:  # noqa: B027
        """Forget the epochs of a trial that are trained again, if that can be."""

    @abstractmethod
    def _end(self, trial: TrialView, now: float) -> None:
        """Log how a trial has ended; its search may let it go on later."""

    @abstractmethod
    def _finish(self) -> None:
        """End with the run."""


LONGEST_PARAM = 6000
"""The most characters that MLflow takes for a parameter."""

LONGEST_NAME = 250

MODEL = "model"
"""The artifact of the search's run that is its best model: `runs:/<run id>/model`."""

ENDS = {"finished": "FINISHED", "failed": "FAILED"}


class MLflowTracker(Tracker):
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

    def _measured(
        self, trial: TrialView, epochs: Mapping[int, Mapping[str, float]], now: float
    ) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(allowed(name), value, round(1000 * now), epoch + 1)
            for epoch, values in sorted(epochs.items())
            for name, value in values.items()
        ]
        self._client.log_batch(self._runs[trial.trial], metrics=metrics)

    def _end(self, trial: TrialView, now: float | None = None) -> None:
        run = self._runs[trial.trial]
        if trial.status == "failed":
            self._client.log_text(run, utf8(trial.reason), "traceback.txt")
        ended = None if now is None else round(1000 * now)
        self._client.set_terminated(run, ENDS.get(trial.status, "KILLED"), end_time=ended)

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
                reason = utf8(named_error_text(error))[:LONGEST_PARAM]
                self._client.set_tag(self._parent, "model_not_logged", reason)
            else:
                self._client.log_artifacts(self._parent, str(Path(scratch, MODEL)), MODEL)


class TensorBoardTracker(Tracker):
    """Writes `<log_dir>/<run id>/<trial id>` as the run goes on; an observer.

    Args:
        log_dir: the folder to give to `tensorboard --logdir`, or a URL that tensorboard knows.

    Raises:
        ConfigurationError: `log_dir` is no path.
        SetupError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise SetupError(
                "TensorBoardTracker needs tensorboard; install it with "
                "pip install 'cerebro-hydra[tensorboard]'"
            ) from error
        self.log_dir = path_or_url("log_dir", log_dir)

    def _start(self, document: RunDocument) -> None:
        self._folder = os.path.join(self.log_dir, document.run_id)
        self._writers = dict[int, Any]()

    def _admit(self, trial: TrialView) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        params = {utf8(name): _plain(value) for name, value in trial.params.items()}
        self._add(trial, time.time(), summary=hparams_pb(params, trial_id=trial.trial_id))

    def _measured(
        self, trial: TrialView, epochs: Mapping[int, Mapping[str, float]], now: float
    ) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for epoch, metrics in sorted(epochs.items()):
            values = [
                Summary.Value(tag=utf8(name), simple_value=value) for name, value in metrics.items()
            ]
            self._add(trial, now, epoch + 1, summary=Summary(value=values))

    def _redo(self, trial: TrialView, now: float) -> None:
        """Let readers forget the points of epochs that are trained again."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        log = SessionLog(status=SessionLog.START)
        self._add(trial, now, len(trial.epochs) + 1, session_log=log)

    def _end(self, trial: TrialView, now: float) -> None:
        self._add(trial, now, summary=_session_end(trial.status, now))
        self._writers.pop(trial.trial).close()  # it has a thread and a file of its own

    def _finish(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _add(self, trial: TrialView, now: float, step: int = 0, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if trial.trial not in self._writers:  # it begins, or goes on after its end
            folder = os.path.join(self._folder, trial.trial_id)
            self._writers[trial.trial] = EventFileWriter(folder)
        self._writers[trial.trial].add_event(Event(wall_time=now, step=step, **content))


def _session_end(status: str, now: float) -> Any:
    """Return the summary of a trial's end; tensorboard's own helper asks for tensorflow."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    ends = {"finished": "STATUS_SUCCESS", "failed": "STATUS_FAILURE"}
    info = plugin_data_pb2.SessionEndInfo(
        status=api_pb2.Status.Value(ends.get(status, "STATUS_UNKNOWN")), end_time_secs=now
    )
    value = Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(
            plugin_data_pb2.HParamsPluginData(session_end_info=info)
        ),
        tensor=metadata.NULL_TENSOR,
    )
    return Summary(value=[value])


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float) else utf8(str(value))


def allowed(name: str) -> str:
    """Return the name of a parameter or metric with "_" for what MLflow refuses."""
    name = re.sub(r"[^\w\-. :/]", "_", name)[:LONGEST_NAME]
    # MLflow takes names that are normalised relative paths.
    if posixpath.normpath(name) != name or name.startswith((".", "/")):
        name = name.replace("/", "_").lstrip(".") or "_"
    return name
