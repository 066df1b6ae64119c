"""Words, numbers and tables that the views share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from cerebro_hydra.observe.records import OutputLine
from cerebro_hydra.observe.view import RunView, TrialView

STYLES = {
    "waiting": "dim",
    "training": "cyan",
    "evaluating": "magenta",
    "finished": "green",
    "failed": "red",
    "stopped": "yellow",
}
_MOST_PARAMETER_COLUMNS = 4
_ARROWS = {"min": "↓", "max": "↑"}
_SPELT = {"min": "lower is better", "max": "higher is better"}


def prefixed(output: OutputLine) -> str:
    """Return a line of a user's code with the trial, or else the worker, that it came from."""
    trial = output.trial
    source = f"worker-{output.worker}" if trial is None else f"trial-{trial:03d}"
    return f"[{source}] {output.line}"


def utf8(text: str) -> str:
    """Return the text with "?" for halves of surrogate pairs, which UTF-8 can't hold."""
    return text.encode("utf-8", "replace").decode()


def number(value: float) -> str:
    """Format a measured value in four significant digits."""
    return f"{value:.4g}"


def numbers(metrics: Mapping[str, float]) -> str:
    """Format measured values with their names."""
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())


def parameters(params: Mapping[str, Any]) -> str:
    """Format parameter values with their names, in the order of the search space."""
    return ", ".join(f"{name}={value}" for name, value in params.items())


def duration(seconds: float) -> str:
    """Format seconds as 7 s, 2 min 05 s or 1 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def metric_heading(view: RunView) -> str:
    """Return the metric and its direction for a narrow column, as "val_accuracy ↑"."""
    return f"{view.metric} {_ARROWS[view.direction]}"


def metric_title(view: RunView) -> str:
    """Return the metric and its direction, as "val_accuracy (higher is better)"."""
    return f"{view.metric} ({_SPELT[view.direction]})"


def summary(view: RunView) -> str:
    """Return what a finished run took, in one line."""
    took = "" if view.seconds is None else f" in {duration(view.seconds)}"
    ended = sum(trial.status == "finished" for trial in view.trials)
    return f"{ended} of {len(view.trials)} trials finished{took}; {view.totals}"


def status_text(trial: TrialView) -> Text:
    """Return a status in its colour; after an early stop with the epoch of the result."""
    words = trial.status
    if trial.stopped_early:
        words += " early" if trial.best_epoch is None else f" early, best {trial.best_epoch + 1}"
    return Text(words, style=STYLES[trial.status])


def parameter_columns(view: RunView) -> list[str]:
    """Return headings for the parameters of trials: one each if they are few, else one for all."""
    names = list(dict.fromkeys(name for trial in view.trials for name in trial.params))
    return names if len(names) <= _MOST_PARAMETER_COLUMNS else ["parameters"]


def add_parameter_columns(table: Table, view: RunView) -> None:
    """Add a column per heading; where room is short, headings fold before values do."""
    for column, heading in enumerate(parameter_columns(view)):
        widest = max(len(parameter_cells(view, trial)[column]) for trial in view.trials)
        table.add_column(Text(heading), overflow="fold", min_width=min(max(widest, 5), 20))


def parameter_cells(view: RunView, trial: TrialView) -> list[Text]:
    """Return one trial's parameters, a cell for each of `parameter_columns`."""
    headings = parameter_columns(view)
    if headings == ["parameters"]:
        return [Text(parameters(trial.params))]
    return [Text(str(trial.params.get(name, ""))) for name in headings]


def final_table(view: RunView) -> Table:
    """Return a table of all trials, best first, each with the numbers of its result."""
    title = Text(f"best first by {metric_title(view)}", style="table.title")
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("trial", no_wrap=True)
    add_parameter_columns(table, view)
    table.add_column("status", no_wrap=True)
    names = list(view.measured())
    for name in names:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for place, trial in enumerate(view.best_first()):
        wins = place == 0 and view.rank(trial)[0] == 0
        epoch = trial.result_epoch
        numbers_of = {} if epoch is None else trial.epochs[epoch]
        cells = [number(numbers_of[name]) if name in numbers_of else "–" for name in names]
        table.add_row(
            "★" if wins else "",
            trial.trial_id,
            *parameter_cells(view, trial),
            status_text(trial),
            *cells,
            style="bold" if wins else "",
        )
    return table
