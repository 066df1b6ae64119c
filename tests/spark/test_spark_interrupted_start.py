"""Whatever ends a program while Java starts, no Java stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MARK = "CEREBRO_HYDRA_TEST_START"
PROGRAM = """
import signal, sys
from cerebro_hydra import local_spark
signal.signal(signal.SIGINT, signal.default_int_handler)
local_spark(workers=1, verbose=0)
"""
SECONDS = 60.0


def marked(mark: str, other: int) -> list[int]:
    """Return the processes that have a mark in their environment, but for one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended, or is another user's
    return [process for process in found if process != other]


def has_begun(process: int) -> bool:
    """Return whether a process runs its own program; while it is forked, Python drops Ctrl-C."""
    try:
        return b"local_spark" not in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_program_that_ends_while_java_starts_leaves_none(number: signal.Signals) -> None:
    mark = f"{os.getpid()}-{number}"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, MARK: mark},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    left: list[int] = []
    try:
        gives_up = time.monotonic() + SECONDS
        while not any(map(has_begun, left := marked(mark, program.pid))):
            assert program.poll() is None and time.monotonic() < gives_up
            time.sleep(0.02)
        program.send_signal(number)
        assert program.wait(SECONDS) != 0
        gives_up = time.monotonic() + SECONDS
        while (left := marked(mark, program.pid)) and time.monotonic() < gives_up:
            time.sleep(0.1)
        assert not left
    finally:
        for process in {program.pid, *left}:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        program.wait()
