"""A process that can do nothing any more ends, so that another one takes its place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cerebro_hydra.agent.device.watchdog import LOWERED_LIMIT, NO_FILES, NO_THREADS

LEAKS = """
import os, resource, threading
from cerebro_hydra.agent.device import watchdog

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
watchdog.POLL_SECONDS = 0.05
released = watchdog.watch_parent()
try:
    while True:
        os.dup(0)
except OSError:
    released.wait(60)
"""


LOWERS = """
import resource
from cerebro_hydra.agent.device import watchdog

watchdog.POLL_SECONDS = 0.05
released = watchdog.watch_parent()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
released.wait(60)
"""


# Where memory for their stacks is limited, a process can't have many threads, whoever runs it.
SPAWNS = """
import resource, threading
from cerebro_hydra.agent.device import watchdog

watchdog.POLL_SECONDS = 0.05
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (4 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
released = watchdog.watch_parent()
try:
    while True:
        threading.Thread(target=released.wait, args=(60,), daemon=True).start()
except RuntimeError as error:
    assert watchdog.is_lack_of_threads(error)
    released.wait(60)
"""


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        (LEAKS, NO_FILES, "has no file descriptor left"),
        (LOWERS, LOWERED_LIMIT, "resource.RLIMIT_FSIZE lowered by a trial"),
        (SPAWNS, NO_THREADS, "nobody can start another one here"),
    ],
    ids=["descriptors", "limits", "threads"],
)
def test_a_process_of_which_a_trial_has_taken_what_others_need_says_so_and_ends(
    program: str, code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == code
    assert said in done.stderr
