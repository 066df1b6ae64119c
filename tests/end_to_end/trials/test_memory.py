"""Trials that do not fit into memory together lie on disk, and a kill costs none of them a bit."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from cerebro_hydra.observe.records import AgentStarted, Decision
from cerebro_hydra.plan.messages.events import SubEpochDone
from tests.end_to_end import models
from tests.end_to_end.test_runs import assert_replays, classes, search

pytestmark = [pytest.mark.slow, pytest.mark.long]


def files_without_a_name(pid: int) -> int:
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(descriptor).endswith("(deleted)")
    return count


class Killer:
    """Watches for spilled segments, and kills the agent that has some when it ends a task."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.spilled: list[int] = []
        self.killed: int | None = None

    def on_record(self, record: object) -> None:
        if isinstance(record, AgentStarted):
            self.pids[record.incarnation] = record.pid
        elif isinstance(record, Decision) and isinstance(record.event, SubEpochDone):
            pid = self.pids[record.event.incarnation]
            if pid == self.killed:
                return
            self.spilled.append(files_without_a_name(pid))
            if self.killed is None and self.spilled[-1]:
                self.killed = pid
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Do nothing."""


def test_trials_on_disk_replay_after_an_agent_was_killed(tmp_path: Path) -> None:
    killer = Killer()
    space = {"lr": [1e-3, 1e-4], "dropout": [0.0, 0.2], "width": [1200]}
    result = search(tmp_path, models.wide, space, classes(), observers=[killer])
    assert killer.killed is not None, "nothing was spilled, so nothing was tested"
    assert max(killer.spilled) > 0
    assert [trial.status for trial in result.trials] == ["finished"] * 4
    assert_replays(result)
