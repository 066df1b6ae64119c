"""Gives an agent a process group, which ends with it: whatever a trial's code has started.

A second process of the group, with nothing in it but a loop, sees that the agent is dead, or that
nobody is left above it, whatever it was killed by and whatever holds Python's lock.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

# Its own words, because the package may lie in a zip. A group's id is not given again while it has
# a member, so that the guard can only end its own.
_GUARD = """
import os, signal, sys, time

def parent_of(process):
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
agent, above = map(int, sys.argv[1:])
while os.getppid() == agent and parent_of(agent) == above:
    time.sleep(0.5)
os.killpg(0, signal.SIGKILL)
"""


def in_own_group(agent: Callable[[], object]) -> None:
    """Run an agent as the leader of a process group, and end all others in it afterwards.

    Called by the main thread of a process that leads no group yet. What has begun a group or
    session of its own meanwhile is not ended.
    """
    before, above = os.getpgrp(), os.getppid()
    os.setpgid(0, 0)
    group = os.getpgrp()
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), str(above)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        agent()
    finally:
        os.setpgid(0, before)
        os.killpg(group, signal.SIGKILL)
        guard.wait()
