"""The result of a search, read from the run's folder alone; its trials can be replayed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from html import escape
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from cerebro_hydra.documents import consistent
from cerebro_hydra.errors import ConfigurationError, JournalError, ReplayError, StoreError
from cerebro_hydra.foreign_text import error_text
from cerebro_hydra.observe import Observer, RunStarted, records_of
from cerebro_hydra.observe.plots import plot, plot_devices
from cerebro_hydra.observe.text import no_winner, number
from cerebro_hydra.observe.timeline import read_run
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.replay.replay_trial import replay
from cerebro_hydra.storage import RunFolder, estimator_factories
from cerebro_hydra.storage.names import checked_trial_id
from cerebro_hydra.tune.model import TrainedModel, checked_outputs
from cerebro_hydra.tune.trial import History, Trial, reason
from cerebro_hydra.tune.weights import RunWeights

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from torch import nn


class SearchResult:
    """A finished run: its trials, the best of them, and what that one predicts."""

    def __init__(
        self,
        folder: RunFolder,
        view: RunView,
        factory: Callable[[], estimator_factories.Factory],
        sourceless: bool,
    ) -> None:
        """Use `SearchResult.open`."""
        self.run_path = folder.path
        self.document = view.document
        self.trials = [Trial.of_view(each) for each in view.trials.values()]
        self.totals = view.totals
        self._known = {trial.trial_id: trial for trial in self.trials}
        self._view = view
        self._folder = folder
        self._factory = factory
        self._sourceless = sourceless
        self._output_columns: list[str] | None = None

    @classmethod
    def open(
        cls,
        run_path: str,
        factory: Callable[[Any], Any] | str | None = None,
        trust: bool = False,
    ) -> SearchResult:
        """Read a run's folder; nothing of the user's is imported before a model is asked for.

        `torch` and `transform` build the model with the run's `estimator_gen_fn`. The process that
        started the run knows it; any other is told which one. If it is not, history, trials and
        weights are there all the same, and the best model comes from the archive in the run's
        folder, without its source.

        Args:
            run_path: `<store>/runs/<run id>`.
            factory: the run's `estimator_gen_fn`, or its "module:name".
            trust: whether the name that the run records may be imported.

        Raises:
            StoreError: there is no run, or a document of it is damaged.
            JournalError: its journal is damaged.
        """
        folder = RunFolder.open(run_path)
        with consistent(f"the journal of run {folder.path!r}", JournalError):
            view = RunView.of_run(folder)
            recorded = view.document.factory
            find = partial(estimator_factories.find, folder.path, recorded, factory, trust)
            return cls(folder, view, find, factory is None and not trust)

    def __repr__(self) -> str:
        finished = f"{self._view.finished} of {len(self.trials)} trials finished"
        return f"SearchResult({finished}, {self.run_path!r})"

    def _repr_html_(self) -> str:
        table = self.to_pandas()
        table["error"] = [reason(trial.error) if trial.error else "" for trial in self.trials]
        cells = table.to_html(index=False, float_format=number, na_rep="")
        return f"<p>{escape(repr(self))}</p>{cells}"

    def to_pandas(self, per_epoch: bool = False) -> pandas.DataFrame:
        """Return the trials as a pandas DataFrame.

        Args:
            per_epoch: False gives one row per trial: trial_id, status, finished_early (whether
                it stopped improving before its last epoch), a column `param_NAME` per
                parameter, the metrics of its result, epochs (ended ones), rung (the epochs after
                which its search compared it last, or missing), result_epoch (from 1), seconds,
                error. True gives one row per trial and ended epoch: trial_id, epoch (from
                1), the parameters, the metrics of that epoch.
        """
        from cerebro_hydra.tune.trial import by_epoch, by_trial

        return by_epoch(self.trials) if per_epoch else by_trial(self.trials)

    def plot(self, parameters: Sequence[str] = ()) -> Figure:
        """Plot learning curves with matplotlib, and each of `parameters` against the metric.

        Raises:
            SetupError: matplotlib is not installed.
            ConfigurationError: there is no such parameter.
        """
        return plot(self._view, parameters)

    def plot_devices(self) -> Figure:
        """Plot with matplotlib what each device of the workers' shard queues did when.

        Raises:
            SetupError: matplotlib is not installed.
            ConfigurationError: no worker had shard queues.
        """
        return plot_devices(*read_run(self._folder))

    def export_to(self, observer: Observer) -> None:
        """Give the whole run to a tracker that did not watch it, such as an `MLflowTracker`."""
        store, run_id = self._folder.store.to_dict(), self._folder.run_id
        for record in records_of(self._folder):
            if isinstance(record, RunStarted):  # the folder may have been moved since
                record = RunStarted(replace(record.document, store=store, run_id=run_id))
            observer.on_record(record)

    @property
    def metric(self) -> str:
        """Return the name of the metric that decides the best trial, such as "val_accuracy"."""
        return self._view.metric

    @property
    def direction(self) -> str:
        """Return "min" or "max": which values of `metric` are better."""
        return self._view.direction

    @property
    def best_trial(self) -> Trial:
        """Return the finished trial whose result's epoch has the best metric.

        If all trials are over and none has finished, it is the best of those that were stopped. If
        the run has ended for now, by its time budget or its target, it is the best of all so far.
        Of values that are equal to within one part in 10^12 the better validation loss wins, then
        the earlier epoch, then the lower trial.

        Raises:
            ConfigurationError: no finished trial has a number there.
        """
        best = self._view.winner
        if best is None:
            raise ConfigurationError(f"{no_winner(self._view)}; look at result.trials")
        return self._known[best.trial_id]

    def get_best_model_history(self) -> History:
        """Return the history of the best trial."""
        return self.best_trial.history

    def get_history(self) -> History:
        """Return the history of the best trial; Cerebro calls it so."""
        return self.get_best_model_history()

    def get_all_model_history(self) -> dict[str, History]:
        """Return the history of every trial, by its id."""
        return {trial.trial_id: trial.history for trial in self.trials}

    def get_best_model(self) -> TrainedModel:
        """Return the best trial's model.

        Raises:
            ConfigurationError: no trial is best.
        """
        return self._model(self.best_trial)

    def get_model(self, trial_id: str) -> TrainedModel:
        """Return the model of a trial that finished, or that its search stopped.

        Raises:
            ConfigurationError: there is no such trial, or it failed or did not end.
        """
        if checked_trial_id(trial_id) not in self._known:
            raise ConfigurationError(
                f"there is no trial {trial_id!r}; trials are {list(self._known)}"
            )
        trial = self._known[trial_id]
        if not trial.has_result:
            raise ConfigurationError(
                f"{trial_id} is {trial.status}, so it has no trained model: "
                f"{trial.error or 'the run ended before it did'}"
            )
        return self._model(trial)

    def get_all_models(self) -> list[TrainedModel]:
        """Return the model of every trial that finished."""
        return [self._model(trial) for trial in self.trials if trial.status == "finished"]

    def torch(self, trial_id: str | None = None) -> nn.Module:
        """Return a trial's model with its trained weights, in eval mode; by default the best one.

        Raises:
            ConfigurationError: there is no such trial, or it did not finish.
            ConfigurationError: the factory is known only by the name that the run records, and
                `open` was not told to trust it.
            ReplayError: its factory can't be found; says how to give it.
            StoreError: a file of its weights is missing or damaged.
        """
        model = self.get_best_model() if trial_id is None else self.get_model(trial_id)
        return model.torch()

    def set_output_columns(self, output_columns: Sequence[str]) -> SearchResult:
        """Name the columns that `transform` adds; see `TrainedModel.set_output_columns`."""
        self._output_columns = checked_outputs(output_columns, self.document.label_columns)
        return self

    def transform(self, df: Any) -> Any:
        """Add the best model's outputs to a DataFrame; see `TrainedModel.transform`."""
        model = self._transforming
        if self._output_columns is not None:
            model.set_output_columns(self._output_columns)
        return model.transform(df)

    @cached_property
    def _transforming(self) -> TrainedModel:
        """Return the best model, kept so that its weights are read and sent once."""
        return self.get_best_model()

    def _model(self, trial: Trial) -> TrainedModel:
        numbers = {each.trial_id: each.trial for each in self._view.trials.values()}
        spec = self._folder.read_trial(numbers[trial.trial_id], self.document.run_id)
        model = TrainedModel(
            RunWeights(self._folder, self.document, spec, trial, self._factory, self._sourceless)
        )
        if self._output_columns is not None:
            model.set_output_columns(self._output_columns)
        return model


def print_replays(
    console: Console,
    run_path: str,
    *,
    trial_id: str | None = None,
    factory: Callable[[Any], Any] | str | None = None,
    trust: bool = False,
) -> bool:
    """Replay one trial of a run, or all that have a result, and print a line for each.

    Args:
        console: where to print.
        run_path: the run's folder.
        trial_id: the trial; None takes all.
        factory: the run's `estimator_gen_fn`, or its "module:name".
        trust: whether the name that the run records may be imported; it is printed.

    Returns:
        Whether every replayed trial was identical, bit for bit.

    Raises:
        ConfigurationError: the factory is known only by the name that the run records, and `trust`
            is False.
        ReplayError: the trial is unknown or has no result, or no trial has one.
    """
    result = SearchResult.open(run_path)
    chosen = [t for t in result.trials if trial_id in (None, t.trial_id)]
    if not chosen:
        raise ReplayError(
            f"there is no trial {trial_id!r}; trials are {[t.trial_id for t in result.trials]}"
        )
    trained = [trial for trial in chosen if trial.has_result]
    if not trained:
        raise ReplayError(
            f"nothing to replay in {run_path!r}: "
            + ", ".join(f"{trial.trial_id} is {trial.status}" for trial in chosen)
        )
    if trust and factory is None:
        console.print(Text(f"factory: {result.document.factory!r}, as the run records it"))
    identical = 0
    for trial in chosen:
        if not trial.has_result:
            console.print(Text.assemble(trial.trial_id, (f"  {trial.status}, not replayed", "dim")))
            continue
        begun = time.perf_counter()
        try:
            report = replay(run_path, trial.trial_id, factory, trust)
        except StoreError as error:  # the files of one trial say nothing of the others'
            why = f"  {error_text(error)}"
            line = Text.assemble(trial.trial_id, ("  NOT REPLAYED", "bold red"), why)
            console.print(line, soft_wrap=True)
            continue
        seconds = time.perf_counter() - begun
        for warning in report.warnings:
            console.print(Text(f"           warning: {warning}", style="yellow"))
        if report.identical:
            identical += 1
            line = Text.assemble(trial.trial_id, ("  identical, every bit", "green"))
        else:
            line = Text.assemble(
                trial.trial_id, ("  DIFFERENT", "bold red"), f"  {report.first_difference}"
            )
        line.append(f"  ({len(trial.visit_log)} sub-epochs, {seconds:.1f} s)", "dim")
        console.print(line, soft_wrap=True)
    console.print(
        f"{identical} of {len(trained)} replayed trials are identical to the bit.",
        style="bold green" if identical == len(trained) else "bold red",
        highlight=False,
    )
    return identical == len(trained)
