"""Lays out a table with one line per trial, whatever the width and the number of parameters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from cerebro_hydra.observe.text import (
    duration,
    metric_heading,
    metric_title,
    number,
    status_text,
    value_text,
)
from cerebro_hydra.observe.trial_view import TrialView
from cerebro_hydra.observe.view import RunView

_WIDEST_VALUE = 16
_LONGEST_WORD = 4
_SPACE = 2
"""Characters between two columns."""


@dataclass(frozen=True)
class Column:
    """One column of a table; `need` orders columns, and those with the most need come last to go.

    `cell` gives what it shows of a trial.
    """

    heading: str
    cell: Callable[[TrialView], str | Text]
    need: int
    right: bool = False


def parameter_columns(
    trials: Sequence[TrialView], names: Mapping[str, str], needs: Sequence[int]
) -> list[Column]:
    """Return a column per parameter; those that differ between trials are needed most.

    Args:
        trials: whose parameters they are.
        names: the heading of each parameter.
        needs: of the first, the second, ... and all others.
    """

    def constant(name: str) -> bool:
        return len({repr(trial.params.get(name)) for trial in trials}) < 2

    needed = sorted(names, key=constant)
    return [
        Column(
            heading,
            lambda trial, name=name: _clipped(value_text(trial.params.get(name, ""))),  # type: ignore[misc]
            needs[min(needed.index(name), len(needs) - 1)],
        )
        for name, heading in names.items()
    ]


def abbreviated(names: Sequence[str]) -> dict[str, str]:
    """Return a short form of each name: initials of several words, the begin of one long word."""
    short = {}
    for name in names:
        words = re.findall(r"[^\W\d_][^\W\d_]*|\d+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name))
        initials = "".join(word[0] for word in words)
        short[name] = name
        if len(name) > _LONGEST_WORD:
            short[name] = initials if len(words) > 1 else name[:_LONGEST_WORD]
    used = Counter(short.values())
    return {name: name if used[each] > 1 else each for name, each in short.items()}


def table_of(
    trials: Sequence[TrialView],
    columns: Callable[[Mapping[str, str]], Sequence[Column]],
    width: int,
    title: str | None = None,
    bold: TrialView | None = None,
) -> tuple[Table, int]:
    """Return a table that is no wider than `width`, and how many columns it leaves out.

    Args:
        trials: the rows.
        columns: makes the columns from the headings of the parameters, which are abbreviated only
            if that makes room for more.
        width: of the table, in characters.
        title: of the table.
        bold: the trial that stands out.
    """
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    in_full = columns(dict(zip(names, names, strict=True)))
    shortened = columns(abbreviated(names))
    choices = [_fitting(each, trials, width) for each in (in_full, shortened)]
    chosen = max(choices, key=len)  # the names in full, if both have as many columns
    heading = None if title is None else Text(title, style="table.title")
    table = Table(title=heading, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    for column in chosen:
        justify = "right" if column.right else "left"
        table.add_column(Text(column.heading), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for trial in trials:
        cells = (column.cell(trial) for column in chosen)
        # Text, because rich would read brackets in a string as markup.
        row = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
        table.add_row(*row, style="bold" if trial is bold else "")
    return table, len(in_full) - len(chosen)


def final_table(view: RunView, width: int) -> Table:
    """Return a table of all trials, best first, each with the numbers of its result."""
    winner, trials = view.winner, view.best_first()

    def columns(names: Mapping[str, str]) -> list[Column]:
        measured = [
            Column(
                name,
                lambda trial, name=name: number(trial.result_metrics.get(name)),  # type: ignore[misc]
                0 if name == view.metric else 4,
                right=True,
            )
            for name in view.measured()
        ]
        return [
            Column("", lambda trial: "★" if trial is winner else " ", 0),
            Column("trial", lambda trial: trial.trial_id, 0),
            *parameter_columns(trials, names, (2, 2, 3, 5)),
            Column("status", status_text, 1),
            *measured,
        ]

    title = f"best first by {metric_title(view)}"
    table, left_out = table_of(trials, columns, width, title, winner)
    table.caption = _left_out(left_out)
    table.caption_justify = "left"
    return table


def live_table(view: RunView, trials: Sequence[TrialView], width: int) -> tuple[Table, str | None]:
    """Return a table of where these trials are, and what it has no room for."""

    def columns(names: Mapping[str, str]) -> list[Column]:
        return [
            Column("trial", lambda trial: trial.trial_id, 0),
            *parameter_columns(list(view.trials.values()), names, (2, 2, 5)),
            Column("status", status_text, 1),
            Column("epoch", lambda trial: view.epoch_text(trial), 3, right=True),
            Column("partition", lambda trial: _shown(trial.partition), 8, right=True),
            Column("worker", lambda trial: _shown(trial.worker), 7, right=True),
            Column("train loss", lambda trial: number(trial.loss), 6, right=True),
            Column(metric_heading(view), lambda trial: number(view.score(trial)), 0, right=True),
            Column("time left", lambda trial: _time_left(view, trial), 4, right=True),
        ]

    table, left_out = table_of(trials, columns, width)
    return table, _left_out(left_out)


def _left_out(count: int) -> str | None:
    if not count:
        return None
    return f"no room here for {count} column{'s' if count > 1 else ''}; the report has all"


def _fitting(columns: Sequence[Column], trials: Sequence[TrialView], width: int) -> list[Column]:
    """Return the columns that fit, those with the most need first, in the order of the table."""
    left, chosen = width - 1, set[int]()
    for index in sorted(range(len(columns)), key=lambda index: columns[index].need):
        column = columns[index]
        cells = (len(column.cell(trial)) for trial in trials)
        left -= max(len(column.heading), *cells, 0) + _SPACE
        if left < 0 and column.need:
            break
        chosen.add(index)
    return [column for index, column in enumerate(columns) if index in chosen]


def _clipped(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDEST_VALUE else text[: _WIDEST_VALUE - 1] + "…"


def _time_left(view: RunView, trial: TrialView) -> str:
    left = view.eta(trial)
    return "" if left is None else duration(left)


def _shown(value: int | None) -> str:
    return "" if value is None else str(value)
