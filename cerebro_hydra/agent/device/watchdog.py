"""Ends an agent that nobody needs any more, whatever its main thread does."""

from __future__ import annotations

import os
import threading

POLL_SECONDS = 1.0

LEAVE_SECONDS = 3.0
"""How long an agent that was told to stop may take to end by itself."""

PARENT_LOST = 3
DRIVER_LOST = 4
TASK_OVERDUE = 5
LEFT_LATE = 6


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


def leave_soon(released: threading.Event) -> None:
    """End this process in some seconds unless the event is set: its main thread may hang."""

    def watch() -> None:
        if not released.wait(LEAVE_SECONDS):
            end(LEFT_LATE)

    threading.Thread(target=watch, name="leave-soon", daemon=True).start()


def end(code: int) -> None:
    """End the process without unwinding; returning from a task has left processes behind."""
    os._exit(code)
