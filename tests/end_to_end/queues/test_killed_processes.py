"""The server of forks, devices and agent of a worker are killed, and no bit is other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cerebro_hydra.plan.messages.events import WorkerLost
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end.queues.test_pipelines import ROWS, pipelined
from tests.end_to_end.runs import PRELOADED, Tape, agent_of, assert_replays, grid, statuses
from tests.processes import assert_gone, children_of, devices_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

DEVICES = 3


def test_a_worker_loses_its_server_of_forks_and_a_device_and_itself_and_changes_no_bit(
    tmp_path: Path,
) -> None:
    """With its server a worker loses all devices at once, each in a task of the same trial."""
    backend = LocalBackend(1, PRELOADED, devices_per_worker=DEVICES)
    killed: list[int] = []
    left: list[int] = []

    def kill(tape: Tape) -> None:
        """Kill the first of what is left to kill, once the trials have got further."""
        agent = agent_of(backend)
        devices = devices_of(agent)
        if len(devices) != DEVICES or tape.commits <= len(killed) or len(killed) == 4:
            return
        (server,) = (each for each in children_of(agent) if children_of(each))
        victim = [server, server, devices[1], agent][len(killed)]
        assert victim is not None
        left.extend([server, *devices])
        os.kill(victim, signal.SIGKILL)
        killed.append(victim)

    space = {"model": ["mlp"], "schedule": ["gpipe"], "recompute": [True, False]}
    tape = Tape(kill)
    options = {"evaluation_metric": "loss", "num_epochs": 3, "observers": [tape]}
    result = grid(backend, tmp_path, pipelined, space, **options).fit(ROWS)
    assert len(killed) == 4
    assert statuses(result) == ["finished", "finished"], result.trials
    assert len(tape.of(WorkerLost)) == 1, "only its agent's death is one of the worker"
    assert_replays(result)
    assert_gone([*killed, *left])
