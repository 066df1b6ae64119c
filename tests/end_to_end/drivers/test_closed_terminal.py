"""A closed terminal ends a run as SIGTERM does: nothing is left, and the run can be resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cerebro_hydra.observe import records_of
from cerebro_hydra.storage import RunFolder
from tests.processes import ancestors_of, assert_gone

pytestmark = [pytest.mark.slow, pytest.mark.long]

HERE = Path(__file__).resolve().parent

ENDS_WITHIN = 20.0  # seconds: the run has ten, and Python and Java end after it

# It draws the live table on the terminal that is then closed.
WITHOUT_SPARK = """
import sys
from tests.end_to_end.drivers.resumed_driver import search
from tests.end_to_end.runs import classes
search(sys.argv[1], 2, num_epochs=100_000, verbose=1).fit(classes())
"""

# Runs a program with a store, and keeps what `fit` raised there: nobody sees it on the terminal.
WRAPPED = """
import runpy, signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where tests run under nohup
_, program, store = sys.argv
sys.argv = [program, store]
try:
    runpy.run_path(program)
except BaseException as error:
    Path(store, "raised").write_text(f"{type(error).__name__}: {error}")
"""


def run_until(seen: str, program: Path, store: Path) -> list[int]:
    """Run a program in a terminal of its own until it prints this, and close the terminal.

    Returns the processes that it had started by then.
    """
    terminal, its_end = os.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-c", WRAPPED, str(program), str(store)],
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), *sys.path]),
            "TERM": "xterm-256color",
        },
    )
    os.close(its_end)
    output = ""
    while not re.search(seen, output):
        output += os.read(terminal, 65536).decode(errors="replace")
    pids = [int(each) for each in os.listdir("/proc") if each.isdecimal()]
    started = [pid for pid in pids if process.pid in ancestors_of(pid)]
    os.close(terminal)
    try:
        process.wait(ENDS_WITHIN)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return started


def assert_ended_whole(store: Path, started: list[int]) -> None:
    (run,) = (store / "runs").iterdir()
    raised = (store / "raised").read_text()
    assert raised.startswith("Interrupted: the run was interrupted")
    assert f"resume it: cerebro-hydra resume {run}" in raised
    assert not (run / "claims").exists()
    assert (run / "report.html").exists()
    assert list(records_of(RunFolder.open(str(run))))
    assert_gone(started)


def test_a_closed_terminal_ends_a_run_and_all_its_processes(tmp_path: Path) -> None:
    program = tmp_path / "driver.py"
    program.write_text(WITHOUT_SPARK)
    started = run_until(" 3/100000", program, tmp_path)
    assert_ended_whole(tmp_path, started)


def test_a_closed_terminal_ends_a_run_on_spark_and_all_its_processes(tmp_path: Path) -> None:
    started = run_until(r"\[\d+, \d+\]", HERE / "endless_driver.py", tmp_path)
    assert_ended_whole(tmp_path, started)
