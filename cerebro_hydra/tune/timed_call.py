"""Calls a function in a thread of its own, which can be given up when it takes too long."""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from cerebro_hydra.recipe import exclusive_generator

GRACE_SECONDS = 2.0
"""How long a thread that was given up may take to unwind."""

T = TypeVar("T")


class Overdue(Exception):
    """A call was given up; the message is the stack that it was in."""


class _GivenUp(SystemExit):
    """Unwinds a thread that was given up, without a word."""


class TimedCall(Generic[T]):
    """Runs a function beside its caller, with thread-local settings that no other call has left.

    Python can't end a thread. One that is given up is unwound by an exception as soon as it runs
    Python code again. Until then it may hang in a call of the system, but `exclusive_generator` is
    taken from it, so that others can go on.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        """Begin at once."""
        self._function = function
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def result(self, seconds: float | None) -> T:
        """Return what the function returns, or raise what it raises.

        Raises:
            Overdue: it takes longer than this, or was given up.
        """
        try:
            self._ended.wait(seconds)
        finally:  # an interrupt of the caller gives it up as well
            stack = self.give_up()
        if stack is not None:
            raise Overdue(stack)
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # or it would keep what failed in a reference cycle
        return self._results.pop()

    def give_up(self) -> str | None:
        """Let the function end as soon as it can; return where it is, or None if it has ended."""
        thread = self._thread.ident
        if self._ended.is_set() or thread is None:
            return None
        frame = sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame else ""
        error = ctypes.py_object(_GivenUp)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
        if not self._ended.wait(GRACE_SECONDS):
            exclusive_generator.take_from(thread)
            self._error = Overdue(stack)
            self._ended.set()
        return stack
