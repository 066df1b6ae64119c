"""Starts threads where the machine may have none left for some seconds."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
