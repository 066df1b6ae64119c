"""Ends an agent that nobody needs any more, whatever its main thread does."""

from __future__ import annotations

import _thread
import errno
import logging
import os
import threading

from cerebro_hydra.recipe.shared_settings import lowered_for_good

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0

LEAVE_SECONDS = 3.0
"""How long an agent that was told to stop may take to end by itself."""

PARENT_LOST = 3
DRIVER_LOST = 4
TASK_OVERDUE = 5
LEFT_LATE = 6
NO_FILES = 7
LOWERED_LIMIT = 8
NO_THREADS = 9

MANY_THREADS = 100
"""How many threads more than at first a process has that has to end where none can be started."""

_NO_FILES = (
    "has no file descriptor left, without which it can neither receive nor write states, and ends; "
    "look for files and sockets that a trial leaves open, or raise ulimit -n"
)
_LOWERED_LIMIT = (
    "has had its hard limit resource.{} lowered by a trial, which other trials can't raise again, "
    "and ends"
)

_NO_THREADS = (
    "has {} threads, and nobody can start another one here; it ends, because others need some; "
    "look for threads that a trial starts and never ends, or raise ulimit -u"
)

_LACKING_POLLS = 5
"""How often in a row a process finds that it lacks something before it ends."""

_THREADLESS_POLLS = 2
"""How often in a row if that is a thread, which nobody can start on this machine then."""


def watch_parent() -> threading.Event:
    """End this process when its parent dies, or a trial has taken what others need for good.

    That is all of its file descriptors, what a limit has left that nobody can raise again, or all
    threads that may be here. Set the returned event to stop watching.
    """
    parent = os.getppid()
    released, limit_lowered, threads = threading.Event(), lowered_for_good(), _threads()

    def watch() -> None:
        lacking = 0
        while not released.wait(POLL_SECONDS):
            if os.getppid() != parent:
                end(PARENT_LOST)
            code, why, polls = 0, "", _LACKING_POLLS
            if _lacks_descriptors():
                code, why = NO_FILES, _NO_FILES
            elif lowered := limit_lowered():
                code, why = LOWERED_LIMIT, _LOWERED_LIMIT.format(lowered)
            elif _lacks_threads() and _threads() > threads + MANY_THREADS:
                code, why = NO_THREADS, _NO_THREADS.format(_threads())
                polls = _THREADLESS_POLLS
            lacking = lacking + 1 if code else 0
            if lacking >= polls:
                end(code)
            if lacking == polls - 1:  # so that there is time to send it
                _log.error("process %d %s", os.getpid(), why)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
    return released


def _lacks_descriptors() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno == errno.EMFILE
    return False


def is_lack_of_threads(error: BaseException) -> bool:
    """Return whether an error says that no thread can be started."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


def _lacks_threads() -> bool:
    try:
        _thread.start_new_thread(int, ())
    except RuntimeError as error:
        return is_lack_of_threads(error)
    return False


def _threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # no Linux
        return 0


def leave_soon(released: threading.Event) -> None:
    """End this process in some seconds unless the event is set: its main thread may hang."""

    def watch() -> None:
        if not released.wait(LEAVE_SECONDS):
            end(LEFT_LATE)

    threading.Thread(target=watch, name="leave-soon", daemon=True).start()


def end(code: int) -> None:
    """End the process without unwinding; returning from a task has left processes behind."""
    os._exit(code)
