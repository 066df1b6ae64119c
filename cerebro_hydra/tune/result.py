"""What a search found, read from the run's folder alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.observe import Observer, RunStarted, records_of
from cerebro_hydra.observe.totals import Totals
from cerebro_hydra.observe.view import RunView, TrialView
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import REFUSED_FILE, RunDocument
from cerebro_hydra.tune.model import History, TrainedModel, checked_outputs

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from pyspark.sql import DataFrame
    from torch import nn


@dataclass(frozen=True)
class Trial:
    """One trial of a search.

    `status` is "finished", "failed", "stopped", or where an unfinished run left it; `error` is a
    failed trial's traceback. `history` has one value per ended epoch, `visit_log` one (epoch,
    partition) per sub-epoch, in the order in which the trial trained on them. `result_epoch` is the
    epoch, from 0, whose weights are the trial's result: the best one with early stopping, else the
    last; None before the first has ended. `seconds` were spent in its sub-epochs, hops and
    evaluations, repeated ones too.
    """

    trial_id: str
    params: dict[str, Any]
    status: str
    history: History
    visit_log: list[tuple[int, int]]
    error: str | None = None
    result_epoch: int | None = None
    seconds: float = 0.0


class SearchResult:
    """A finished run: its trials, the best of them, and what that one predicts."""

    def __init__(
        self,
        folder: RunFolder,
        view: RunView,
        refused: Sequence[dict[str, Any]],
        factory: Callable[[Any], Any] | str | None,
    ) -> None:
        """Use `SearchResult.open`."""
        assert view.document is not None
        self.run_path = folder.path
        self.document: RunDocument = view.document
        self.trials = [_trial(trial) for trial in view.trials]
        self.trials += [
            Trial(each["trial_id"], each["params"], "failed", {}, [], each["error"])
            for each in refused
        ]
        self.totals: Totals = view.totals
        self._view = view
        self._folder = folder
        self._factory = factory
        self._output_columns: list[str] | None = None

    @classmethod
    def open(cls, run_path: str, factory: Callable[[Any], Any] | str | None = None) -> SearchResult:
        """Read a run's folder.

        Args:
            run_path: `<store>/runs/<run id>`.
            factory: the run's `estimator_gen_fn`, or its "module:name"; needed only by `torch` and
                `transform`, in a process that did not start the run, if it was not recorded.

        Raises:
            StoreError: there is no run.
            JournalError: its journal is damaged.
        """
        folder = RunFolder.open(run_path)
        return cls(folder, RunView.of_run(folder), folder.read_json(REFUSED_FILE), factory)

    def __repr__(self) -> str:
        finished = sum(trial.status == "finished" for trial in self.trials)
        return f"SearchResult({finished} of {len(self.trials)} trials finished, {self.run_path!r})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.to_pandas().to_html(index=False)}"

    def to_pandas(self, per_epoch: bool = False) -> pandas.DataFrame:
        """The trials as a DataFrame.

        Args:
            per_epoch: False gives one row per trial: trial_id, status, a column `param_NAME` per
                parameter, the metrics of its result, epochs (ended ones), result_epoch (from 0),
                seconds, error. True gives one row per trial and ended epoch: trial_id, epoch (from
                0), the parameters, the metrics of that epoch.
        """
        from cerebro_hydra.tune.frames import by_epoch, by_trial

        return by_epoch(self.trials) if per_epoch else by_trial(self.trials)

    def plot(self, parameters: Sequence[str] = ()) -> Figure:
        """Learning curves with matplotlib, and each of `parameters` against the metric.

        Raises:
            SetupError: matplotlib is not installed.
            ConfigurationError: there is no such parameter.
        """
        from cerebro_hydra.observe.plots import plot

        return plot(self._view, parameters)

    def export_to(self, observer: Observer) -> None:
        """Give the whole run to a tracker that did not watch it, such as an `MLflowTracker`.

        Trials that could not be built are no part of it.
        """
        store, run_id = self._folder.store.to_dict(), self._folder.run_id
        for record in records_of(self._folder):
            if isinstance(record, RunStarted):  # the folder may have been moved since
                record = RunStarted(replace(record.document, store=store, run_id=run_id))
            observer.on_record(record)

    @property
    def metric(self) -> str:
        """Name in a history of what decides, such as "val_accuracy"."""
        return self._view.metric

    @property
    def direction(self) -> str:
        """Either "min" or "max": which values of `metric` are better."""
        return self._view.direction

    @property
    def best_trial(self) -> Trial:
        """The finished trial with the best metric after its result's epoch; the first of equals.

        Raises:
            ConfigurationError: no finished trial has a number there.
        """
        best = self._view.best_first()[0]
        if self._view.rank(best)[0] != 0:
            raise ConfigurationError(
                f"no trial is best: none finished with a number as {self.metric}; look at "
                "result.trials"
            )
        return self.trials[best.trial]

    def get_best_model_history(self) -> History:
        """The history of the best trial."""
        return self.best_trial.history

    def get_history(self) -> History:
        """The history of the best trial, by the name that a model has for it."""
        return self.get_best_model_history()

    def get_all_model_history(self) -> dict[str, History]:
        """The history of every trial, by its id."""
        return {trial.trial_id: trial.history for trial in self.trials}

    def get_best_model(self) -> TrainedModel:
        """The best trial's model.

        Raises:
            ConfigurationError: no trial is best.
        """
        return self._model(self.best_trial)

    def get_all_models(self) -> list[TrainedModel]:
        """The model of every trial that finished."""
        return [self._model(trial) for trial in self.trials if trial.status == "finished"]

    def torch(self, trial_id: str | None = None) -> nn.Module:
        """A trial's model with its trained weights, in eval mode; by default the best trial's.

        Raises:
            ConfigurationError: there is no such trial, or it did not finish.
            ReplayError: its factory can't be found; says how to give it.
        """
        return self._model(self._finished(trial_id)).torch()

    def set_output_columns(self, output_columns: Sequence[str]) -> SearchResult:
        """Name the columns that `transform` adds; see `TrainedModel.set_output_columns`."""
        self._output_columns = checked_outputs(output_columns, self.document)
        return self

    def transform(self, df: DataFrame) -> DataFrame:
        """The DataFrame with the best model's outputs; see `TrainedModel.transform`."""
        model = self._transforming
        if self._output_columns is not None:
            model.set_output_columns(self._output_columns)
        return model.transform(df)

    @cached_property
    def _transforming(self) -> TrainedModel:
        """The best model, whose weights are read and sent once; nobody else renames its columns."""
        return self.get_best_model()

    def _model(self, trial: Trial) -> TrainedModel:
        number = self.trials.index(trial)
        model = TrainedModel(self._folder, self.document, number, trial.history, self._factory)
        if self._output_columns is not None:
            model.set_output_columns(self._output_columns)
        return model

    def _finished(self, trial_id: str | None) -> Trial:
        if trial_id is None:
            return self.best_trial
        known = {trial.trial_id: trial for trial in self.trials}
        if trial_id not in known:
            raise ConfigurationError(f"there is no trial {trial_id!r}; trials are {list(known)}")
        if known[trial_id].status != "finished":
            raise ConfigurationError(
                f"{trial_id} is {known[trial_id].status}, so it has no trained model: "
                f"{known[trial_id].error or 'the run ended before it did'}"
            )
        return known[trial_id]


def _trial(view: TrialView) -> Trial:
    error = view.reason if view.status == "failed" else None
    return Trial(
        view.trial_id,
        view.params,
        view.status,
        view.history,
        view.visit_log,
        error,
        view.result_epoch,
        view.seconds,
    )
