"""Trials that do not fit into memory together lie on disk, and a kill costs none of them a bit."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from cerebro_hydra.plan.messages.events import SubEpochDone
from tests.end_to_end import models
from tests.end_to_end.runs import Tape, assert_replays, classes, search, statuses

pytestmark = [pytest.mark.slow, pytest.mark.long]


def files_without_a_name(pid: int) -> int:
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(descriptor).endswith("(deleted)")
    return count


def test_trials_on_disk_replay_after_an_agent_was_killed(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one_that_spills(tape: Tape) -> None:
        """Kill the first agent that has spilled segments when it ends a task."""
        for done in tape.of(SubEpochDone, last=True):
            pid = tape.agents[done.incarnation]
            if not killed and files_without_a_name(pid):
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    space = {"lr": [1e-3, 1e-4], "dropout": [0.0, 0.2], "width": [1200]}
    tape = Tape(kill_one_that_spills)
    result = search(tmp_path, models.wide, space, classes(), observers=[tape])
    assert killed, "nothing was spilled, so nothing was tested"
    assert statuses(result) == ["finished"] * 4
    assert_replays(result)
