"""Forwards what a user's code prints or logs in an agent, line by line, with its trial."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MOST_AT_ONCE = 10_000
"""Lines that an agent may send at once."""

LINES_PER_SECOND = 1_000
"""Lines that it may send on in every second; the others are counted, not kept."""

LONGEST_LINE = 1 << 16
"""Characters after which a line is sent that has no end yet."""

Send = Callable[[dict[str, Any]], object]

_trial: int | None = None  # one at a time: that of the thread which computes is the process's

_streams: tuple[()] | tuple[LineStream, LineStream] = ()  # user code may replace those of `sys`


def attribute_to(trial: int | None) -> None:
    """Attribute whatever this process prints and logs from now on to a trial, or to none.

    What the code of the trial before has put in the place of the process's streams is taken away.
    """
    global _trial
    if trial != _trial:
        for stream in _streams:
            stream.flush()
        if _streams:
            sys.stdout, sys.stderr = _streams
        _trial = trial


def _message(stream: str, line: str) -> dict[str, Any]:
    return {"output": {"trial": _trial, "stream": stream, "line": line}}


class LineLimit:
    """Sends lines no faster than the driver can show them, and says how many it left out.

    Thread-safe. Neither this process nor the driver would else have memory for what a trial prints
    that prints without end.
    """

    def __init__(self, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._lock = threading.RLock()
        self._allowed = float(MOST_AT_ONCE)
        self._since = clock()
        self._left_out = 0

    def __call__(self, message: dict[str, Any]) -> None:
        """Send a line, or count it."""
        with self._lock:
            now = self._clock()
            gained = (now - self._since) * LINES_PER_SECOND
            self._allowed, self._since = min(MOST_AT_ONCE, self._allowed + gained), now
            if self._allowed < 1:
                self._left_out += 1
                return
            self._allowed -= 1
            self._tell()
            self._send(message)

    def close(self) -> None:
        """Say what was left out last."""
        with self._lock:
            self._tell()

    def _tell(self) -> None:
        if self._left_out:
            why = f"more than {LINES_PER_SECOND} a second came for long"
            self._send(_message("log", f"{self._left_out} lines were left out, because {why}"))
            self._left_out = 0


class LineStream(io.TextIOBase):
    """A text stream that sends whole lines."""

    def __init__(self, name: str, send: Send) -> None:
        super().__init__()
        self._name = name
        self._send = send
        self._rest = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._send(_message(self._name, line))
        if len(self._rest) >= LONGEST_LINE:
            self.flush()
        return len(text)

    def flush(self) -> None:
        if self._rest:
            rest, self._rest = self._rest, ""
            self._send(_message(self._name, rest))


class _Handler(logging.Handler):
    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for line in self.format(record).splitlines():
                self._send(_message("log", line))
        except Exception:
            self.handleError(record)  # as every handler does: a bad call is shown, not raised


@contextmanager
def forwarded(send: Send) -> Iterator[None]:
    """Send what this process prints and logs, in place of writing it to the executor's files."""
    global _streams
    streams = sys.stdout, sys.stderr
    limited = LineLimit(send)
    handler = _Handler(limited)
    _streams = LineStream("stdout", limited), LineStream("stderr", limited)
    sys.stdout, sys.stderr = _streams
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        for stream in _streams:
            stream.flush()
        attribute_to(None)  # this process may be the agent of another run next
        _streams = ()
        limited.close()
        sys.stdout, sys.stderr = streams
