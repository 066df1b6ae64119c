"""Lets Ctrl-C end a run whatever has become of Spark, and SIGTERM as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM and Ctrl-C while the body runs, so that no agent is left.

    A handler that the program has set for SIGTERM stays; one for Ctrl-C, which mostly is pyspark's,
    is asked first. Only the main thread can set any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    term, ctrl_c = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    if term is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
    if callable(ctrl_c):
        signal.signal(signal.SIGINT, _interrupting(ctrl_c))
    try:
        yield
    finally:
        if term is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, term)
        if callable(ctrl_c):
            signal.signal(signal.SIGINT, ctrl_c)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt("SIGTERM")


def _interrupting(handler: Handler) -> Handler:
    def interrupt(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except Exception:  # pyspark's fails if its SparkContext is stopped
            raise KeyboardInterrupt from None

    return interrupt
