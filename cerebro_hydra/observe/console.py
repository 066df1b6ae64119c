"""Shows a run on the console: as a table that redraws itself, or as plain lines, one per epoch."""

from __future__ import annotations

import io
import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cerebro_hydra.foreign_text import visible
from cerebro_hydra.observe.records import (
    Decision,
    Observer,
    OutputLine,
    Record,
    RunEnded,
    RunStarted,
    TrialAdmitted,
)
from cerebro_hydra.observe.text import (
    counted,
    devices_text,
    duration,
    metric_heading,
    metric_title,
    not_saved,
    number,
    numbers,
    parameters,
    prefixed,
    saved_work,
    status_text,
    summary,
    troubles,
    value_text,
    winner_line,
)
from cerebro_hydra.observe.view import RunView, TrialView
from cerebro_hydra.plan.messages.events import Event, SearchClosed, WorkerLost
from cerebro_hydra.plan.messages.instructions import EndEpoch, FinishTrial, Instruction, Redo
from cerebro_hydra.storage.run_document import RunDocument
from cerebro_hydra.waits import give_screen

_WIDE = 120
_LOGGER = logging.getLogger("cerebro_hydra.trials")

_SECONDS_BETWEEN_FRAMES = 0.1
_OTHER_LINES = 9
"""Lines of a frame beside the trials: a heading, the bar, the totals, a wait, empty ones."""

_FEWEST_TRIALS = 3
_BAR = 20

_WIDEST_VALUE = 16
_LONGEST_WORD = 4
_SPACE = 2
"""Characters between two columns."""

_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.3;margin:0">{code}</pre>'


class ConsoleObserver(Observer, Protocol):
    """An observer that may hold the screen."""

    def close(self) -> None:
        """Give the screen back, also in the middle of a run."""


def console_observer(verbose: int, console: Console | None = None) -> ConsoleObserver:
    """Return a live table on a terminal and in a notebook, else plain lines.

    With `verbose=0` nothing is printed, and what the user's code prints goes to Python's logging.
    """
    if verbose == 0:
        return LogLines()
    console = console or Console()
    if console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal):
        return LiveTable(console)
    return PlainLines(console)


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
                if trial.reason:
                    self._print(f"{trial.trial_id} {trial.stage}: {trial.reason.rstrip()}")
            case Redo(index, reason=reason):
                trial = self.view.trials[index]
                self._print(f"{trial.trial_id} repeats sub-epochs: {reason}")

    def _tell_loss(self, event: Event) -> None:
        if isinstance(event, WorkerLost):
            for worker, incarnation in self.view.workers.items():
                if incarnation == event.incarnation:
                    self._print(f"worker {worker} lost: {event.reason}")

    def _print(self, line: str) -> None:
        # Neither markup nor emoji nor colours nor wrapping: the lines are for grep.
        self._console.print(
            visible(line), markup=False, emoji=False, highlight=False, soft_wrap=True
        )


class LiveTable:
    """Shows where every trial is; what the user's code prints scrolls by above the table."""

    def __init__(self, console: Console) -> None:
        """Draw on `console`."""
        self.view = RunView()
        self._console = console
        self._screen: Screen | None = None
        self._drawn = 0.0

    def on_record(self, record: Record) -> None:
        """Take in one record, and redraw if the last frame is old enough."""
        self.view.apply(record)
        match record:
            case RunStarted():
                if record.document.reader:
                    reader = f"rows are read by {record.document.reader}"
                    self._console.print(reader, highlight=False)
                self._screen = screen_of(self._console)
            case OutputLine():
                self._console.print(Text(prefixed(record)))
            case RunEnded():
                self.close()
                self._console.print(final_table(self.view, self._console.width))
                lines = [summary(self.view), winner_line(self.view), *not_saved(self.view)]
                self._console.print(Text(visible("\n".join(lines))))
        for trouble in troubles(record):
            self._console.print(Text(visible(trouble)))
        now = time.monotonic()
        if self._screen is not None and now - self._drawn >= _SECONDS_BETWEEN_FRAMES:
            self._drawn = now
            self._screen.show(frame(self.view, self._console.width, self._console.height))

    def close(self) -> None:
        """Take the table off the screen and give the cursor back; also after an interrupt."""
        if self._screen is not None:
            self._screen.close()
            self._screen = None


def frame(view: RunView, width: int, height: int) -> Group:
    """Return the trials as they stand, best first, and below them how far the whole run is.

    Where not all trials fit into `height` lines, they are those in training and the best.
    """
    trials, devices = view.best_first(), _devices(view, max(1, height // 6))
    room = max(_FEWEST_TRIALS, height - _OTHER_LINES - len(devices) - bool(view.untrained))
    shown = sorted(trials, key=lambda trial: trial.worker is None)[:room]
    table, left_out = live_table(view, [trial for trial in trials if trial in shown], width)
    saved = filter(None, [saved_work(view)])
    notes = [*saved, *devices, f"{metric_title(view)}; {len(view.workers)} workers, {view.totals}"]
    if len(shown) < len(trials):
        notes.insert(0, f"and {len(trials) - len(shown)} more trials")
    if left_out:
        notes.append(left_out)
    below = [
        Text(f" {visible(note)}", style="dim", no_wrap=True, overflow="ellipsis") for note in notes
    ]
    return Group(table, _bar(view), *below)


def _devices(view: RunView, most: int) -> list[str]:
    """Return a line per worker with shard queues; one line for all where they are too many."""
    devices = [view.devices[key] for key in sorted(view.devices)]
    workers = [list(group) for _, group in groupby(devices, lambda each: each.worker)]
    if len(workers) > most:
        return [f"{len(workers)} workers: {devices_text(view, devices)}"]
    return [f"worker {group[0].worker}: {devices_text(view, group)}" for group in workers]


def _bar(view: RunView) -> Text:
    """Return how far the run is as a bar, the count of trials, and the time left."""
    done = math.floor(view.share_done * _BAR)
    left = view.seconds_left()
    bar = Text(" ", no_wrap=True, overflow="ellipsis")
    bar.append("━" * done, "green").append("━" * (_BAR - done), "bright_black")
    rest = "" if left is None else f", about {duration(left)} left"
    return bar.append(f"  {counted(view)}{rest}")


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
        table.add_column(Text(visible(column.heading)), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for trial in trials:
        cells = (column.cell(trial) for column in chosen)
        # Text, because rich would read brackets in a string as markup.
        row = (Text(visible(cell)) if isinstance(cell, str) else cell for cell in cells)
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
            *_rung_column(view),
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
            *_rung_column(view),
            Column("partition", lambda trial: _shown(trial.partition), 8, right=True),
            Column("worker", lambda trial: _shown(trial.worker), 7, right=True),
            Column("train loss", lambda trial: number(trial.loss), 6, right=True),
            Column(metric_heading(view), lambda trial: number(view.score(trial)), 0, right=True),
            Column("time left", lambda trial: _time_left(view, trial), 4, right=True),
        ]

    table, left_out = table_of(trials, columns, width)
    return table, _left_out(left_out)


def _rung_column(view: RunView) -> list[Column]:
    """Return the column of the rungs that trials were compared at, if there are any."""
    rung = Column("rung", lambda trial: _shown(trial.rung), 3, right=True)
    return [rung] if view.has_rungs else []


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


class Screen(Protocol):
    """Shows one frame at a time."""

    def show(self, frame: RenderableType) -> None:
        """Show a frame in the place of the one before."""

    def close(self) -> None:
        """Take the latest frame away."""


def screen_of(console: Console) -> Screen:
    """Return the screen of a console."""
    return NotebookScreen(console.width) if console.is_jupyter else TerminalScreen(console)


class WaitingFrame:
    """Draws a frame, and below it what is waited for. Thread-safe."""

    def __init__(self, draw: Callable[[RenderableType], None]) -> None:
        """Take the lines of waits over."""
        self._draw, self._lock = draw, threading.Lock()
        self._frame: RenderableType = ""
        self._line = ""
        give_screen(self._wait)

    def show(self, frame: RenderableType) -> None:
        """Draw a frame in the place of the one before."""
        with self._lock:
            self._frame = frame
            self._redraw()

    def close(self) -> None:
        """Leave the lines of waits to the terminal again."""
        give_screen(None)

    def _wait(self, line: str) -> None:
        with self._lock:
            self._line = line
            self._redraw()

    def _redraw(self) -> None:
        below = Text(f" {self._line}", style="dim", no_wrap=True, overflow="ellipsis")
        self._draw(Group(self._frame, below) if self._line else self._frame)


class TerminalScreen:
    """Redraws a terminal; what `console` prints meanwhile scrolls by above the frame."""

    def __init__(self, console: Console) -> None:
        """Hide the cursor."""
        # Frames are drawn by records, so that no other thread reads the view.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._frame = WaitingFrame(lambda frame: self._live.update(frame, refresh=True))
        self._live.start()

    def show(self, frame: RenderableType) -> None:
        """Redraw the frame."""
        self._frame.show(frame)

    def close(self) -> None:
        """Take the frame off the screen and give the cursor back."""
        self._frame.close()
        self._live.stop()


class NotebookScreen:
    """Updates one HTML display below a notebook's cell; needs nothing but the notebook itself."""

    def __init__(self, width: int) -> None:
        """Make the display, of so many characters."""
        from IPython.display import HTML, DisplayHandle

        self._html, self._width = HTML, width
        self._handle = DisplayHandle()
        self._handle.display(HTML(""))
        self._frame = WaitingFrame(
            lambda frame: self._handle.update(self._html(html(frame, self._width)))
        )

    def show(self, frame: RenderableType) -> None:
        """Put a frame into the display."""
        self._frame.show(frame)

    def close(self) -> None:
        """Empty the display."""
        self._frame.close()
        self._handle.update(self._html(""))


def html(frame: RenderableType, width: int) -> str:
    """Return a frame as HTML, with its colours."""
    console = Console(
        file=io.StringIO(), record=True, width=width, force_jupyter=False, force_terminal=True
    )
    console.print(frame)
    return console.export_html(code_format=_HTML, inline_styles=True)
