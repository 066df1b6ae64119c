"""Ends waits of other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancellation:
    """Ends, once it is called for, all waits that were registered with it, and all later ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._ends: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        """Return whether `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """End all waits; any thread may call this, and more than once."""
        with self._lock:
            self._cancelled = True
            ends, self._ends = self._ends, []
        for end in ends:
            end()

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Have `cancel` call `end` during the block; after `cancel`, call it at once."""
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
