"""An agent in a child process: what becomes of its end, and that it dies with its parent."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cerebro_hydra.agent import in_child
from cerebro_hydra.agent.device.watchdog import DRIVER_LOST, LEFT_LATE, TASK_OVERDUE
from cerebro_hydra.agent.in_child import (
    run_in_child,
    share_with_parent,
    tell_parent_of_leaving,
    tell_parent_that_no_more_is_to_be_told,
)
from cerebro_hydra.wire.control import tell_end
from cerebro_hydra.wire.credentials import new_credentials
from tests.processes import run_python
from tests.wire.control_driver import Driver, dial, ignore


def leaves_late() -> None:
    tell_parent_of_leaving()
    os._exit(LEFT_LATE)


def ends_overdue() -> None:
    tell_parent_that_no_more_is_to_be_told()
    os._exit(TASK_OVERDUE)


@pytest.mark.parametrize("end", [lambda: None, leaves_late])
def test_an_agent_that_ends_when_told_to_ends_its_task(end: Callable[[], object]) -> None:
    run_in_child(end, ignore, may_fail=False)


def test_what_an_agent_raises_is_the_tasks_failure() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*ValueError: rows differ"):
        run_in_child(lambda: (_ for _ in ()).throw(ValueError("rows differ")), ignore, False)


def test_a_death_that_nobody_misses_fails_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_child, "KILL_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match="the agent's process: it was ended by SIGKILL"):
        run_in_child(lambda: os.kill(os.getpid(), 9), ignore, may_fail=False)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os._exit(3), "it ended with exit code 3"),
        (lambda: os._exit(0), "it ended with exit code 0"),
        (lambda: os._exit(LEFT_LATE), f"it ended with exit code {LEFT_LATE}"),
        (lambda: ctypes.string_at(0), "it was ended by SIGSEGV"),
        (lambda: os.kill(os.getpid(), 9), "it was ended by SIGKILL, as the system does where"),
        (lambda: os._exit(DRIVER_LOST), f"it ended with exit code {DRIVER_LOST}"),
        (lambda: os._exit(TASK_OVERDUE), f"it ended with exit code {TASK_OVERDUE}"),
        (ends_overdue, "the connection broke"),  # it said so itself
    ],
)
@pytest.mark.parametrize("tls", [False, True])
def test_how_an_agent_died_is_told_before_its_connection_breaks(
    end: Callable[[], object], told: str, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_child, "KILL_SECONDS", 0.0)
    driver = Driver(new_credentials(tls=tls))

    def agent() -> None:
        faulthandler.disable()  # pytest's, which prints a crash
        share_with_parent("a", dial(driver))
        end()

    with pytest.raises(RuntimeError, match="of the agent's process"):
        run_in_child(agent, partial(tell_end, driver.uri, driver.credentials), may_fail=False)
    assert driver.next() == ("hello", "a")
    kind, incarnation, reason = driver.next()
    assert (kind, incarnation) == ("closed", "a") and reason.startswith(told)
    driver.server.close()
    assert driver.heard.empty()


COMPUTES = """
import os, sys, numpy
from cerebro_hydra.agent.in_child import run_in_child

def compute():
    import torch
    torch.set_num_threads(2)
    return float(torch.ones(1 << 22).exp().sum())

if sys.argv[1] == "before":
    compute()
run_in_child(lambda: print(compute() > 0, os.getpid(), flush=True), print, may_fail=True)
print(os.getpid())
"""


@pytest.mark.parametrize("when", ["before", pytest.param("only then", marks=pytest.mark.long)])
def test_an_agent_that_computes_with_threads_is_no_child_of_a_process_that_did(when: str) -> None:
    done = run_python("-c", COMPUTES, when).stdout.split()
    assert done[0] == "True" and (done[1] == done[2]) == (when == "before")


PARENT = """
import os, sys, ctypes
from cerebro_hydra.agent.in_child import run_in_child

def lock_python():
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).sleep(600)

run_in_child(lock_python, print, may_fail=False)
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
