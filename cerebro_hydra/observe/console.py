"""Chooses the view that suits the place from which a run is watched."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console

from cerebro_hydra.observe.lines import LogLines, PlainLines
from cerebro_hydra.observe.observer import Observer
from cerebro_hydra.observe.table import LiveTable


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
