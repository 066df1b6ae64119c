"""Keeps the best model of a run in its folder, so that it loads where its source is unknown."""

from __future__ import annotations

from collections.abc import Callable

from cerebro_hydra.errors import CerebroHydraError
from cerebro_hydra.observe import Record, RunEnded
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.shards.model_archive import keep_archive
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune.result import SearchResult


class WinnerArchive:
    """Saves the best model when every trial is over; an observer.

    A run that ends before that keeps no archive, because an interrupt must not take long.
    """

    def __init__(self, folder: RunFolder, report: Callable[[str], None]) -> None:
        """Save nothing yet; `report` is given what is done and why it can't be done."""
        self._folder = folder
        self._report = report
        self._view = RunView()

    def on_record(self, record: Record) -> None:
        """Save the model when the run has ended; all that it needs is read from the folder."""
        self._view.apply(record)
        winner = self._view.winner
        if not isinstance(record, RunEnded) or winner is None:
            return
        if not all(trial.over for trial in self._view.trials.values()):
            return
        self._report(f"saving {winner.trial_id}, the best model, to load without its source")
        try:
            model = SearchResult.open(self._folder.path).get_model(winner.trial_id)
            keep_archive(self._folder, winner.trial_id, model.archive())
        except CerebroHydraError as error:
            self._report(f"{winner.trial_id} needs its source: {error}")
