"""What a trial's code starts ends with its agent, and a server of forks with its starter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.observe import AgentStarted, Decision
from cerebro_hydra.plan.messages.instructions import Commit
from cerebro_hydra.recipe import Recipe
from tests.end_to_end import models
from tests.end_to_end.runs import classes, search
from tests.processes import assert_gone

ROOT = Path(__file__).resolve().parents[2]

# An agent that starts a program and a fork, and a process above it that an agent's end leaves.
AGENT = """
import ctypes, json, os, subprocess, sys, time
from cerebro_hydra.agent.process_group import in_own_group

def agent():
    forked = os.fork()
    if forked == 0:
        time.sleep(1000)
    started = subprocess.Popen(["sleep", "1000"]).pid
    print(json.dumps([os.getpid(), forked, started]), flush=True)
    match sys.argv[1]:
        case "locks Python":
            ctypes.PyDLL(None).sleep(1000)
        case "waits":
            time.sleep(1000)

if os.fork() == 0:
    group = os.getpgrp()
    in_own_group(agent)
    print(os.getpgrp() == group, flush=True)
    os._exit(0)
os.wait()
time.sleep(1000)
"""


def program(code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )


@pytest.mark.parametrize("killed", ["the agent", "what is above it"])
@pytest.mark.parametrize("fault", ["waits", "locks Python"])
def test_whatever_an_agent_started_ends_with_it(killed: str, fault: str) -> None:
    with program(AGENT, fault) as above:
        assert above.stdout is not None
        agent, *started = json.loads(above.stdout.readline())
        os.kill(agent if killed == "the agent" else above.pid, signal.SIGKILL)
        assert_gone([agent, *started])
        above.kill()


def test_whatever_an_agent_started_ends_when_it_returns_and_its_process_goes_on() -> None:
    with program(AGENT, "returns") as above:
        assert above.stdout is not None
        _, *started = json.loads(above.stdout.readline())
        assert above.stdout.readline() == "True\n"
        assert_gone(started)
        above.kill()


SERVER = """
import os, sys, time
from cerebro_hydra.agent.device.process import fork_server

os.environ["PYTHONPATH"] = os.pathsep.join([sys.argv[1], os.environ["PYTHONPATH"]])
fork_server().Process(target=time.sleep, args=(1000,)).start()
"""


def test_a_server_of_forks_ends_with_its_starter_though_it_still_imports(tmp_path: Path) -> None:
    began = tmp_path / "began"
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(began)!r}, 'w').write(f'{{os.getpid()}}\\n')\n"
        "for _ in range(1000): time.sleep(0.1)\n"
    )
    with program(SERVER, str(tmp_path)) as driver:
        while not began.exists() or not (server := began.read_text().strip()):
            assert driver.poll() is None
            time.sleep(0.01)
        driver.kill()
        assert_gone([int(server)])


def factory(params: dict[str, Any]) -> Recipe:
    """A trial that starts a program wherever it is built, and names it in a folder."""
    if os.getpid() != params["driver"]:
        started = subprocess.Popen(["sleep", "1000"])
        Path(params["folder"], str(started.pid)).touch()
    return models.feed_forward({"lr": 0.01})


class Killer:
    """Kills an agent once, after the first sub-epoch."""

    pid = 0

    def on_record(self, record: Any) -> None:
        if isinstance(record, AgentStarted):
            self.pid = self.pid or record.pid
        commits = isinstance(record, Decision) and any(
            isinstance(each, Commit) for each in record.instructions
        )
        if commits and self.pid > 0:
            os.kill(self.pid, signal.SIGKILL)
            self.pid = -1


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(None, marks=pytest.mark.long), 2])
def test_programs_of_trials_outlive_neither_their_agent_nor_the_run(
    tmp_path: Path, devices: int | None
) -> None:
    started = tmp_path / "started"
    started.mkdir()
    space = {"folder": [str(started)], "driver": [os.getpid()]}
    options = {"resources": {"devices_per_worker": devices}, "observers": [Killer()]}
    result = search(tmp_path / "store", factory, space, classes(), 1, **options)
    assert [trial.status for trial in result.trials] == ["finished"]
    programs = [int(file.name) for file in started.iterdir()]
    assert len(programs) >= 2
    assert_gone(programs)
