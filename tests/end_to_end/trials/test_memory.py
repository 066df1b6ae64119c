"""What an agent holds does not grow with the trials that it has seen, and may lie on disk."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra import SparkEstimator
from cerebro_hydra.plan.messages.events import SubEpochDone
from cerebro_hydra.plan.messages.instructions import Commit
from cerebro_hydra.testing.local_backend import Arrays
from tests.end_to_end import models
from tests.end_to_end.runs import Tape, assert_replays, classes, search, statuses

pytestmark = pytest.mark.slow

FEATURES = 64
FIRST = 30
"""Trials after which an agent holds all that it ever will."""
KINDS = 10
"""Models of different structure."""


def estimator_gen_fn(params: dict[str, Any]) -> SparkEstimator:
    """Return a net with a frozen layer of its own, which is larger than all others."""
    number, frozen, width = params["number"], params["frozen"], 8 + params["number"] % KINDS
    first = nn.Linear(FEATURES, frozen).requires_grad_(False)
    nn.init.constant_(first.weight, 1e-3 * (number + 1))
    layers: list[nn.Module] = [first, nn.Linear(frozen, width)]
    for _ in range(params["depth"]):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return SparkEstimator(model=model, optimizer=optimizer, loss=nn.MSELoss(), batch_size=32)


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    resident: int
    threads: int
    files: int

    @classmethod
    def by(cls, pid: int) -> Held:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        resident, threads = (
            int(re.search(rf"{name}:\s*(\d+)", status)[1]) for name in ("VmRSS", "Threads")
        )
        return cls(resident, threads, len(os.listdir(f"/proc/{pid}/fd")))


def held_after(
    folder: Path, trials: int, validation: float | None, frozen: int, depth: int
) -> dict[int, Held]:
    """Return what an agent holds by the number of trials that it has trained."""
    random = np.random.default_rng(0)
    features = random.normal(size=(64, FEATURES)).astype("float32")
    trained: set[int] = set()
    after: dict[int, Held] = {}

    def look(tape: Tape) -> None:
        """Look at the agent after the sub-epoch of each trial."""
        trained.update(commit.trial for commit in tape.of(Commit, last=True))
        if trained and len(trained) not in after:
            after[len(trained)] = Held.by(tape.pids[0][0])

    space = {"number": range(trials), "frozen": [frozen], "depth": [depth]}
    options = {"evaluation_metric": "loss", "num_epochs": 1, "validation": validation}
    data = Arrays({"features": features, "label": features[:, :1]})
    tape = Tape(look)
    result = search(folder, estimator_gen_fn, space, data, 1, observers=[tape], **options)
    assert set(statuses(result)) == {"finished"}
    return after


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has /proc")
@pytest.mark.parametrize(
    ("trials", "validation", "frozen", "depth", "factor"),
    [
        pytest.param(60, None, 2000, 4, 1.04, id="one after the other"),
        pytest.param(300, 0.2, 8, 60, 1.25, id="all alive at once", marks=pytest.mark.long),
    ],
)
def test_an_agent_holds_no_more_after_many_trials_than_after_some(
    tmp_path: Path, trials: int, validation: float | None, frozen: int, depth: int, factor: float
) -> None:
    after = held_after(tmp_path, trials, validation, frozen, depth)
    assert after[trials].resident <= factor * after[FIRST].resident
    for held in ("threads", "files"):
        counts = [getattr(after[number], held) for number in range(1, trials + 1)]
        # A checkpoint has a thread and two files of its own for a moment.
        assert max(counts[FIRST:]) <= max(counts[:FIRST]) + 2, held


# ---------------------------------------------------------------------- what lies on disk


def files_without_a_name(pid: int) -> int:
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            count += os.readlink(descriptor).endswith("(deleted)")
    return count


@pytest.mark.long
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
