"""Keeps an agent's death from ending Spark's job, where it would be the task's last failure."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable

from cerebro_hydra.agent.watchdog import LEFT_LATE

KILL_SECONDS = 60.0
"""How long a task waits to be killed after the coordinator has lost its agent."""

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_LONGEST_STORY = 32_768  # bytes, which fit into a pipe that nobody reads


def run_in_child(agent: Callable[[], object]) -> None:
    """Run an agent in a child of this process, whose death is no failure of the task.

    Spark counts the deaths of a task's Python process, and ends the job of all agents at
    `spark.task.maxFailures`. An attempt that is killed does not count. So when the child dies, this
    process waits for the kill that follows each loss of an agent (`SparkLauncher.replace`).

    Raises:
        RuntimeError: the agent raised, or nobody missed it when it died.
    """
    parent = os.getpid()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _die_with(parent)
            agent()
            code = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-_LONGEST_STORY:])
        finally:
            os._exit(code)
    os.close(writing)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.set_blocking(reading, False)
    with open(reading, "rb") as pipe:
        story = pipe.read() or b""
    if story:
        raise RuntimeError(story.decode(errors="replace"))
    if code not in (0, LEFT_LATE):
        time.sleep(KILL_SECONDS)
        raise RuntimeError(f"the agent's process ended with {code}, and no coordinator missed it")


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, even while Python is locked."""
    with contextlib.suppress(AttributeError):  # no Linux: the agent looks for its parent itself
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
