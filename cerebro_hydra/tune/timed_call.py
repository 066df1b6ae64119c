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


class _GivenUp(SystemExit):
    """Unwinds a thread that was given up, without a word."""


class TimedCall(Generic[T]):
    """Runs a function beside its caller, with thread-local settings that no other call has left.

    Python can't end a thread. One that is given up is unwound by an exception as soon as it runs
    Python code again; until then it has no part in the run any more, and `exclusive_generator` is
    taken from it.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        """Begin at once."""
        self._function = function
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def result(self, seconds: float | None) -> T:
        """Return what the function returns, or raise what it raises.

        Raises:
            TimeoutError: it takes longer than this and is given up; the message is its stack.
        """
        try:
            ended = self._ended.wait(seconds)
        except BaseException:
            self.give_up()
            raise
        if not ended:
            raise TimeoutError(self.give_up())
        if self._error is not None:
            raise self._error
        return self._result[0]

    def give_up(self) -> str:
        """Let the thread end as soon as it can; return where it was."""
        thread = self._thread.ident
        assert thread is not None
        frame = sys._current_frames().get(thread)
        stack = "" if frame is None else "".join(traceback.format_stack(frame))
        error = ctypes.py_object(_GivenUp)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
        if not self._ended.wait(GRACE_SECONDS):
            exclusive_generator.take_from(thread)
        return stack
