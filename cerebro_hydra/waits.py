"""Tells what is done while the user waits: one line that is rewritten on a terminal, else several.

A screen that has the whole terminal, as a live table, shows that line itself (`give_screen`).
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Literal, TextIO

from cerebro_hydra.foreign_text import visible
from cerebro_hydra.threads import start

FIRST_LINE_SECONDS = 1.5


class Waiting:
    """Reports a line when something has taken some seconds, after twice as many, and so on.

    On a terminal it is one line, which counts the seconds and is erased when the wait is over.

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
        start(self._thread)
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
                line = f"{what} ({due:.0f} s)"
                if isinstance(self._report, Lines) and self._report.rewrite(line):
                    passed, due = due, math.floor(due) + 1.0
                else:
                    self._report(line)
                    passed, due = due, 2 * due
            if isinstance(self._report, Lines):
                self._report.rewrite("")
            self._changed.clear()


_LOCK = threading.RLock()
_screen: Callable[[str], None] | None = None  # shows the line of a wait in place of a terminal
_open: TextIO | None = None  # the terminal on which the line of a wait stands


class Lines:
    """Prints lines at once, to the standard output or error of the moment. Thread-safe."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name

    def __call__(self, line: str) -> None:
        """Print a line that stays."""
        with _LOCK, suppress(OSError):  # its terminal may be closed
            _erase()
            print(visible(line), file=getattr(sys, self._name), flush=True)

    def rewrite(self, line: str) -> bool:
        """Show a line in the place of the one before, or "" for none; False where that can't be."""
        global _open
        with _LOCK, suppress(OSError):
            if _screen is not None:
                _screen(visible(line))
                return True
            stream = getattr(sys, self._name)
            # What stands in for a terminal may pass on whole lines alone.
            own = stream is not None and stream is getattr(sys, f"__{self._name}__")
            if not own or not stream.isatty() or os.environ.get("TERM") == "dumb":
                return False
            _erase()
            if line:
                print(visible(line)[: _columns(stream) - 1], end="", file=stream, flush=True)
                _open = stream
            return True
        return False


def _columns(stream: TextIO) -> int:
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return shutil.get_terminal_size().columns


def _erase() -> None:
    """Take the line of a wait off its terminal."""
    global _open
    if _open is not None:
        print("\r\x1b[K", end="", file=_open, flush=True)
        _open = None


def give_screen(show: Callable[[str], None] | None) -> None:
    """Let `show` have the lines of waits, each in the place of the one before; None: no more."""
    global _screen
    with _LOCK, suppress(OSError):
        _screen = show
        _erase()


to_stdout = Lines("stdout")
"""Prints a line at once among a program's output."""

to_stderr = Lines("stderr")
"""Prints a line at once where it does not mix with a program's output."""


def to_nobody(line: str) -> None:
    """Print nothing."""


@contextmanager
def loading(module: str) -> Iterator[None]:
    """Import a module that is needed later, while the body waits for something else.

    The body imports nothing that leads to it, and so calls no code of a user.
    """
    # Joined, because two threads inside one circular import see half a module.
    thread = threading.Thread(target=_load, args=(module,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _load(module: str) -> None:
    collects = gc.isenabled()
    gc.disable()  # what is imported stays: looking for garbage in it takes a third of the time
    try:
        importlib.import_module(module)
    finally:
        if collects:
            gc.enable()
