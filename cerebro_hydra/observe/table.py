"""Shows a run as a table that redraws itself, on a terminal or in a notebook."""

from __future__ import annotations

import math
import time
from itertools import groupby

from rich.console import Console, Group
from rich.text import Text

from cerebro_hydra.observe.columns import final_table, live_table
from cerebro_hydra.observe.records import OutputLine, Record, RunEnded, RunStarted
from cerebro_hydra.observe.screen import Screen, screen_of
from cerebro_hydra.observe.text import (
    counted,
    devices_text,
    duration,
    metric_title,
    not_saved,
    prefixed,
    summary,
    troubles,
    winner_line,
)
from cerebro_hydra.observe.view import RunView

_SECONDS_BETWEEN_FRAMES = 0.1
_OTHER_LINES = 8
"""Lines of a frame beside the trials: a heading, the bar, the totals, empty ones."""
_FEWEST_TRIALS = 3
_BAR = 20


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
                self._console.print("\n".join(lines), highlight=False, markup=False)
        for trouble in troubles(record):
            self._console.print(Text(trouble))
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
    room = max(_FEWEST_TRIALS, height - _OTHER_LINES - len(devices))
    shown = sorted(trials, key=lambda trial: trial.worker is None)[:room]
    table, left_out = live_table(view, [trial for trial in trials if trial in shown], width)
    notes = [*devices, f"{metric_title(view)}; {len(view.workers)} workers, {view.totals}"]
    if len(shown) < len(trials):
        notes.insert(0, f"and {len(trials) - len(shown)} more trials")
    if left_out:
        notes.append(left_out)
    below = [Text(f" {note}", style="dim", no_wrap=True, overflow="ellipsis") for note in notes]
    return Group(table, _bar(view), *below)


def _devices(view: RunView, most: int) -> list[str]:
    """Return a line per worker with shard queues; one line for all where they are too many."""
    devices = [view.devices[key] for key in sorted(view.devices)]
    workers = [list(group) for _, group in groupby(devices, lambda each: each.worker)]
    if len(workers) > most:
        return [f"{len(workers)} workers: {devices_text(devices)}"]
    return [f"worker {group[0].worker}: {devices_text(group)}" for group in workers]


def _bar(view: RunView) -> Text:
    """Return how far the run is as a bar, the count of trials, and the time left."""
    done = math.floor(view.share_done * _BAR)
    left = view.seconds_left()
    bar = Text(" ", no_wrap=True, overflow="ellipsis")
    bar.append("━" * done, "green").append("━" * (_BAR - done), "bright_black")
    rest = "" if left is None else f", about {duration(left)} left"
    return bar.append(f"  {counted(view)}{rest}")
