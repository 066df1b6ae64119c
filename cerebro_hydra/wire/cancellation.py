"""Takes back waits that run on other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancellation:
    """A switch, thrown once; what is done under it ends, and what starts later never begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._ends: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Throw the switch; may be called from any thread, and again."""
        with self._lock:
            self._cancelled = True
            ends, self._ends = self._ends, []
        for end in ends:
            end()

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Have `end` called by `cancel` during the block, or at once if it was thrown before."""
        with self._lock:
            if not self._cancelled:
                self._ends.append(end)
            cancelled = self._cancelled
        if cancelled:
            end()
        try:
            yield
        finally:
            with self._lock:
                if end in self._ends:
                    self._ends.remove(end)
