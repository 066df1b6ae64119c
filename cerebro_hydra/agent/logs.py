"""Forwards what a user's code prints or logs in an agent, line by line, with its trial."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Send = Callable[[dict[str, Any]], object]

_trial: int | None = None  # one task at a time: the main thread's trial is the process's


@contextmanager
def current_trial(trial: int | None) -> Iterator[None]:
    """Attribute whatever the body prints and logs to a trial."""
    global _trial
    _trial = trial
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _trial = None


def _message(stream: str, line: str) -> dict[str, Any]:
    return {"output": {"trial": _trial, "stream": stream, "line": line}}


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
    streams = sys.stdout, sys.stderr
    handler = _Handler(send)
    sys.stdout, sys.stderr = LineStream("stdout", send), LineStream("stderr", send)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = streams
