"""Ends an agent whose parent or coordinator is gone."""

from __future__ import annotations

import os
import threading

POLL_SECONDS = 1.0

PARENT_LOST = 3
DRIVER_LOST = 4


def watch_parent() -> threading.Event:
    """End this process when its parent dies; set the returned event to stop watching."""
    parent = os.getppid()
    released = threading.Event()

    def watch() -> None:
        while not released.wait(POLL_SECONDS):
            if os.getppid() != parent:
                end(PARENT_LOST)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
    return released


def end(code: int) -> None:
    """End the process without unwinding; returning from a task has left processes behind."""
    os._exit(code)
