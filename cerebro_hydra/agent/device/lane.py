"""A lane does what it is given on one thread, one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Lane:
    """Does one thing after the other, on a thread of its own or on the one that calls `run`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._items: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread: int | None = None

    def start(self) -> None:
        """Begin on a thread of its own."""
        threading.Thread(target=self.run, name=self._name, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        """Let something be done; called from any thread."""
        self._items.put(work)

    def close(self) -> None:
        """End after what was put before."""
        self._items.put(None)

    def run(self) -> None:
        """Do what is put, until it is closed."""
        self.thread = threading.get_ident()
        while self.step():
            pass

    def step(self) -> bool:
        """Do the next thing, once it is there; return whether there was one before the end."""
        if (work := self._items.get()) is None:
            return False
        work()  # its slabs are given back before the next order comes
        return True
