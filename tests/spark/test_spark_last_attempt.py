"""An agent in a child process: what becomes of its end, and that it dies with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cerebro_hydra.agent.device.watchdog import LEFT_LATE
from cerebro_hydra.spark import launcher
from cerebro_hydra.spark.launcher import run_in_child


@pytest.mark.parametrize("end", [lambda: None, lambda: os._exit(LEFT_LATE)])
def test_an_agent_that_ends_when_told_to_ends_its_task(end: Callable[[], object]) -> None:
    run_in_child(end)


def test_what_an_agent_raises_is_the_tasks_failure() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*ValueError: rows differ"):
        run_in_child(lambda: (_ for _ in ()).throw(ValueError("rows differ")))


def test_a_death_that_nobody_misses_fails_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "KILL_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="ended with -9, and no coordinator missed it"):
        run_in_child(lambda: os.kill(os.getpid(), 9))


PARENT = """
import os, sys, ctypes
from cerebro_hydra.spark.launcher import run_in_child

def lock_python():
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).sleep(600)

run_in_child(lock_python)
"""


def test_an_agent_that_locks_python_dies_with_its_task() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    parent.kill()
    assert parent.stdout.read() == ""  # the child held the pipe open
    parent.wait()
    deadline = time.monotonic() + 5
    while _runs(child):
        assert time.monotonic() < deadline, "the agent outlived its task"


def _runs(pid: int) -> bool:
    """Return whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
