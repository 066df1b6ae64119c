"""Shows a run as a table that redraws itself, on a terminal."""

from __future__ import annotations

import time

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cerebro_hydra.observe.records import (
    OutputLine,
    Record,
    RunEnded,
    RunStarted,
    TrialAdmitted,
)
from cerebro_hydra.observe.text import (
    add_parameter_columns,
    duration,
    final_table,
    metric_heading,
    metric_title,
    not_saved,
    number,
    parameters,
    prefixed,
    status_text,
    summary,
    troubles,
    winner_line,
)
from cerebro_hydra.observe.view import RunView, TrialView

_SECONDS_BETWEEN_FRAMES = 0.1
_WIDTH_FOR_PARAMETERS = 100


class LiveTable:
    """Shows where every trial is; what the user's code prints scrolls by above the table."""

    def __init__(self, console: Console) -> None:
        """Draw on `console`."""
        self.view = RunView()
        self._console = console
        self._live: Live | None = None
        self._drawn = 0.0

    def on_record(self, record: Record) -> None:
        """Take in one record, and redraw if the last frame is old enough."""
        self.view.apply(record)
        match record:
            case RunStarted():
                if record.document.reader:
                    reader = f"rows are read by {record.document.reader}"
                    self._console.print(reader, highlight=False)
                # Frames are drawn by records, so that no other thread reads the view.
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            case TrialAdmitted(spec):
                if self._console.width < _WIDTH_FOR_PARAMETERS:
                    self._console.print(Text(f"{spec.trial_id}: {parameters(spec.params)}"))
            case OutputLine():
                self._console.print(Text(prefixed(record)))
            case RunEnded():
                self.close()
                self._console.print(final_table(self.view))
                lines = [summary(self.view), winner_line(self.view), *not_saved(self.view)]
                self._console.print("\n".join(lines), highlight=False, markup=False)
        for trouble in troubles(record):
            self._console.print(Text(trouble))
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= _SECONDS_BETWEEN_FRAMES:
            self._drawn = now
            self._live.update(frame(self.view, self._console.width), refresh=True)

    def close(self) -> None:
        """Take the table off the screen and give the cursor back; also after an interrupt."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def frame(view: RunView, width: int) -> Group:
    """Return the table as it stands, with what the hops have cost so far.

    A narrow table (`width` in characters) has no room for the parameters.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("trial", no_wrap=True)
    wide = width >= _WIDTH_FOR_PARAMETERS
    parameter_cells = add_parameter_columns(table, view) if wide else {}
    table.add_column("status", no_wrap=True)
    for title in ("epoch", "partition", "worker", "train loss", metric_heading(view), "ETA"):
        table.add_column(Text(title), justify="right", no_wrap=True)
    for trial in view.trials.values():
        table.add_row(*_row(view, trial, parameter_cells.get(trial.trial, [])))
    below = f" {metric_title(view)}; {len(view.workers)} workers, {view.totals}"
    return Group(table, Text(below, style="dim"))


def _row(view: RunView, trial: TrialView, parameter_cells: list[Text]) -> tuple[str | Text, ...]:
    score, left, num_epochs = view.score(trial), view.eta(trial), view.document.num_epochs
    epoch = len(trial.epochs) if trial.over else min(trial.epoch + 1, num_epochs)
    return (
        trial.trial_id,
        *parameter_cells,
        status_text(trial),
        f"{epoch}/{num_epochs}",
        "" if trial.partition is None else str(trial.partition),
        "" if trial.worker is None else str(trial.worker),
        "" if trial.loss is None else number(trial.loss),
        "" if score is None else number(score),
        "" if left is None else duration(left),
    )
