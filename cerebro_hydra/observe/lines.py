"""Shows a run as plain lines, one per ended epoch of a trial, for logs, files and pipes."""

from __future__ import annotations

import io
import logging

from rich.console import Console

from cerebro_hydra.observe.columns import final_table
from cerebro_hydra.observe.records import (
    Decision,
    OutputLine,
    Record,
    RunEnded,
    RunStarted,
    TrialAdmitted,
)
from cerebro_hydra.observe.text import (
    duration,
    not_saved,
    numbers,
    parameters,
    prefixed,
    summary,
    taken_over,
    troubles,
    winner_line,
)
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.plan.events import Event, SearchClosed, WorkerGivenUp, WorkerLost
from cerebro_hydra.plan.instructions import EndEpoch, FinishTrial, Instruction, Redo
from cerebro_hydra.storage.run_document import RunDocument

_WIDE = 120
_LOGGER = logging.getLogger("cerebro_hydra.trials")


class LogLines:
    """Sends what user code prints or logs, and troubles, to Python's logging."""

    def on_record(self, record: Record) -> None:
        """Log one line under `cerebro_hydra.trials`."""
        if isinstance(record, OutputLine):
            _LOGGER.info("%s", prefixed(record))
        for trouble in troubles(record):
            _LOGGER.warning("%s", trouble)

    def close(self) -> None:
        """Do nothing: plain lines hold no screen."""


class PlainLines:
    """Prints a line when an epoch or a trial ends and when a worker comes or goes."""

    def __init__(self, console: Console) -> None:
        """Print to `console`."""
        self.view = RunView()
        self._console = console

    def on_record(self, record: Record) -> None:
        """Take in one record and print what it changed."""
        if isinstance(record, Decision):
            self._tell_loss(record.event)  # while the view still knows the worker
        self.view.apply(record)
        match record:
            case RunStarted(document):
                self._tell_start(document)
            case TrialAdmitted(spec):
                self._print(f"{spec.trial_id}: {parameters(spec.params)}")
            case Decision():
                if isinstance(record.event, SearchClosed):
                    self._print(f"{len(self.view.trials)} trials in all")
                for instruction in record.instructions:
                    self._tell(instruction)
            case OutputLine():
                self._print(prefixed(record))
            case RunEnded():
                # A pipe or file has no width of its own, and files are read in wide windows.
                width = max(self._console.width, _WIDE)
                page = Console(file=io.StringIO(), width=width, color_system=None)
                with page.capture() as table:
                    page.print(final_table(self.view, width))
                self._print(table.get())
                self._print(
                    "\n".join([summary(self.view), winner_line(self.view), *not_saved(self.view)])
                )
        for trouble in troubles(record):
            self._print(trouble)

    def close(self) -> None:
        """Do nothing: plain lines hold no screen."""

    def _tell_start(self, document: RunDocument) -> None:
        self._print(
            f"run {document.run_id}: {document.num_epochs} epochs, "
            f"{document.num_partitions} partitions"
        )
        if document.reader:
            self._print(f"rows are read by {document.reader}")

    def _tell(self, instruction: Instruction) -> None:
        match instruction:
            case EndEpoch(index, epoch):
                trial = self.view.trials[index]
                left = self.view.eta(trial)
                rest = f", {duration(left)} left" if left else ""
                self._print(
                    f"{trial.trial_id} epoch {epoch + 1}/{self.view.document.num_epochs}: "
                    f"{numbers(trial.epochs[epoch])}{rest}"
                )
            case FinishTrial(index):
                trial = self.view.trials[index]
                if trial.stopped_early:
                    self._print(f"{trial.trial_id} {trial.reason}")
                elif trial.status != "finished":
                    self._print(f"{trial.trial_id} {trial.status}: {trial.reason.rstrip()}")
            case Redo(index, reason=reason):
                trial = self.view.trials[index]
                self._print(f"{trial.trial_id} repeats sub-epochs: {reason}")

    def _tell_loss(self, event: Event) -> None:
        if isinstance(event, WorkerGivenUp):
            self._print(taken_over(event))
        if isinstance(event, WorkerLost):
            for worker, incarnation in self.view.workers.items():
                if incarnation == event.incarnation:
                    self._print(f"worker {worker} lost: {event.reason}")

    def _print(self, line: str) -> None:
        # Neither markup nor emoji nor colours nor wrapping: the lines are for grep.
        self._console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
