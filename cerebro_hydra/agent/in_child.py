"""Runs an agent in a child of this process, which can say how the agent's process ended.

The child gives its parent the connection to the driver as well. So that does not break before the
parent has told the driver the exit code or the signal, which the dead can't.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable

from cerebro_hydra.agent.device.endings import ending_of
from cerebro_hydra.available_memory import memory_kills
from cerebro_hydra.wire.control import ControlClient

KILL_SECONDS = 60.0
"""How long a task waits to be killed after the coordinator has lost its agent."""

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_LONGEST_STORY = 32_768  # bytes, which fit into a pipe that nobody reads
_LONGEST_NAME = 64  # bytes of an incarnation

_LEAVES = b"leaves"
_IS_TOLD = b"is told"

_parent: socket.socket | None = None  # of this process, if it is such a child


def share_with_parent(incarnation: str, control: ControlClient) -> None:
    """Give the parent of this process the agent's connection, if it is one that waits for that."""
    if _parent is not None:
        socket.send_fds(_parent, [incarnation.encode()], [control.fileno()])


def tell_parent_of_leaving() -> None:
    """Tell the parent that the agent ends as told; no exit code can, as trials give any."""
    if _parent is not None:
        with contextlib.suppress(OSError):  # a trial has closed it
            _parent.send(_LEAVES)


def tell_parent_that_no_more_is_to_be_told() -> None:
    """Tell the parent that the agent has told the driver why it ends, or that it has lost it."""
    if _parent is not None:
        with contextlib.suppress(OSError):
            _parent.send(_IS_TOLD)


def run_in_child(
    agent: Callable[[], object], tell: Callable[[str, str], object], may_fail: bool
) -> None:
    """Run an agent in a child of this process, and tell the driver how it ended if it died.

    Spark counts the failures of a task, and ends the job of all agents at `spark.task.maxFailures`.
    An attempt that is killed does not count. So where it may not fail, this process waits for the
    kill that follows each loss of an agent (`SparkLauncher.replace`). In the child of a process
    that has computed with several threads, OpenMP hangs: where a failure does no harm, the agent
    runs in that process itself, and nobody can tell how it ended.

    Args:
        agent: is called in the child.
        tell: is given the incarnation of one that died, and how it did.
        may_fail: whether a failure ends no job.

    Raises:
        RuntimeError: the agent raised or died, and nobody missed it.
    """
    if may_fail and _may_have_computed():
        agent()
        return
    parent, kills = os.getpid(), memory_kills()
    reading, writing = os.pipe()
    own, childs = socket.socketpair(type=socket.SOCK_DGRAM)
    child = os.fork()
    if child == 0:
        _be_child(agent, parent, writing, childs)
    os.close(writing)
    childs.close()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.set_blocking(reading, False)
    with open(reading, "rb") as pipe:
        story = pipe.read() or b""
    ending = ending_of(code, memory_ran_out=memory_kills() > kills)
    named, connections, words = b"", [], set[bytes]()
    with own, contextlib.suppress(BlockingIOError):
        own.setblocking(False)
        while True:
            said, given, _, _ = socket.recv_fds(own, _LONGEST_NAME, 1)
            if given:
                named, connections = said, given
            else:
                words.add(said)
    if connections and not words and not story:
        tell(named.decode(), ending)
    for connection in connections:
        os.close(connection)
    if story:
        raise RuntimeError(story.decode(errors="replace"))
    if _LEAVES in words:
        return
    if not may_fail:
        time.sleep(KILL_SECONDS)
    raise RuntimeError(f"of the agent's process: {ending}")


def _may_have_computed() -> bool:
    """Return whether torch may have threads in this process, as after a task of another job."""
    try:
        return "torch" in sys.modules and len(os.listdir("/proc/self/task")) > 1
    except OSError:  # no Linux
        return True


def _be_child(
    agent: Callable[[], object], parent: int, writing: int, to_parent: socket.socket
) -> None:
    """Run the agent, and end this process."""
    global _parent
    code = 1
    try:
        die_with(parent)
        _parent = to_parent
        agent()
        tell_parent_of_leaving()
        code = 0
    except BaseException:
        os.write(writing, traceback.format_exc().encode()[-_LONGEST_STORY:])
    finally:
        os._exit(code)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, even while Python is locked.

    It dies at once if its parent is another one already.
    """
    with contextlib.suppress(AttributeError):  # no Linux: the agent looks for its parent itself
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
