"""Tells what is done while the user waits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from cerebro_hydra.foreign_text import visible

FIRST_LINE_SECONDS = 1.5


class Waiting:
    """Reports a line when something has taken some seconds, after twice as many, and so on.

    Args:
        report: is given each line, in a thread of its own.
        what: what is done first; "" for nothing that is waited for.
        seconds: when the first line is due.
    """

    def __init__(
        self, report: Callable[[str], None], what: str = "", seconds: float = FIRST_LINE_SECONDS
    ) -> None:
        self._report, self._what, self._seconds = report, what, seconds

    def now(self, what: str) -> None:
        """Say that something else is done from now on, whose time is counted anew."""
        self._what = what
        self._changed.set()

    def __enter__(self) -> Waiting:
        self._ended, self._changed = False, threading.Event()
        self._thread = threading.Thread(target=self._tell, name="waiting", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended = True
        self._changed.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._ended:
            what, passed, due = self._what, 0.0, self._seconds
            while not self._changed.wait(due - passed if what else None):
                self._report(f"{what} ({due:.0f} s)")
                passed, due = due, 2 * due
            self._changed.clear()


def to_stderr(line: str) -> None:
    """Print a line at once where it does not mix with a program's output."""
    with suppress(OSError):  # its terminal may be closed
        print(visible(line), file=sys.stderr, flush=True)


def to_nobody(line: str) -> None:
    """Print nothing."""
