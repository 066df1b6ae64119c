"""Ends a server of forks, the first of whose modules this is, within a second of its starter.

By itself it looks for its starter only once it has loaded all that it was told to, which may take
minutes on a busy machine. Its group is its own, since it outlives the runs of a worker.
"""

from __future__ import annotations

import atexit
import os
import signal
from types import FrameType

_SECONDS = 1.0

_server, _starter = os.getpid(), os.getppid()


def _look(number: int, frame: FrameType | None) -> None:
    # A fork has the handler, too, but no timer that calls it.
    if os.getpid() == _server and os.getppid() != _starter:
        os._exit(1)


os.setpgid(0, 0)
signal.signal(signal.SIGALRM, _look)
signal.setitimer(signal.ITIMER_REAL, _SECONDS, _SECONDS)
# An interpreter that ends takes its handlers back: the next signal would kill it.
atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
