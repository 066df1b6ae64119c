"""Tells how far the admission of trials is, if it takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

FIRST_LINE_SECONDS = 5.0


class AdmissionProgress:
    """Reports a line after some seconds, after twice as many, and so on.

    Attributes:
        trials: how many candidates there are so far.
        done: how many of them are admitted or refused.

    Args:
        report: is given each line, in a thread of its own.
        seconds: when the first line is due.
    """

    def __init__(self, report: Callable[[str], None], seconds: float = FIRST_LINE_SECONDS) -> None:
        self.trials = self.done = 0
        self._report = report
        self._seconds = seconds

    def __enter__(self) -> AdmissionProgress:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="admission-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _tell(self) -> None:
        passed, due = 0.0, self._seconds
        while not self._ended.wait(due - passed):
            if self.done < self.trials:
                self._report(
                    f"admission: {self.done} of {self.trials} trials are checked after {due:.0f} s"
                )
            passed, due = due, 2 * due
