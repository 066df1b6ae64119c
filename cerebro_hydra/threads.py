"""Starts threads where the machine may have none left for some seconds, and sets things for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

_TRIES, _PAUSE = 60, 0.5  # half a minute


def start(thread: threading.Thread) -> None:
    """Start a thread, if need be some seconds later: a trial's process may have all until it ends.

    Raises:
        RuntimeError: half a minute later none can be started either.
    """
    for _ in range(_TRIES):
        try:
            return thread.start()
        except RuntimeError:
            time.sleep(_PAUSE)
    return thread.start()


def own_thread(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread, which is there from now on."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    executor.submit(int)
    return executor


class SetForAll:
    """Has something set for all threads of a process, from its first user's begin to the last end.

    Args:
        begin: sets it, and returns what gives it back.
    """

    def __init__(self, begin: Callable[[], Callable[[], object]]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._users = 0
        self._end: Callable[[], object] | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use it for a while."""
        with self._lock:
            if self._users == 0:
                self._end = self._begin()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:  # users end in any order
                self._users -= 1
                if self._users == 0 and self._end is not None:
                    self._end()
