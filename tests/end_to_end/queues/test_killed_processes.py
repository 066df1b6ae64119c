"""The server of forks, devices and agent of a worker are killed, and no bit is other.

So are devices of a pipeline that evaluates.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cerebro_hydra.plan.messages.events import EvaluationDone, WorkerLost
from cerebro_hydra.plan.messages.instructions import Evaluate
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end.queues.mixed_models import class_loss
from tests.end_to_end.queues.test_pipelines import ROWS, assert_pipelined, pipelined
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


def test_a_worker_whose_server_of_forks_is_stopped_as_a_device_dies_changes_no_bit(
    tmp_path: Path,
) -> None:
    """It neither tells of that death nor forks another one, and is killed in the end."""
    backend = LocalBackend(1, PRELOADED, devices_per_worker=2)
    stopped: list[int] = []

    def stop(tape: Tape) -> None:
        agent = agent_of(backend)
        devices = devices_of(agent)
        if stopped or len(devices) != 2 or not tape.commits:
            return
        stopped.extend(each for each in children_of(agent) if children_of(each))
        os.kill(stopped[0], signal.SIGSTOP)
        os.kill(devices[0], signal.SIGKILL)

    space = {"model": ["mlp"], "schedule": ["gpipe"], "recompute": [True, False]}
    tape = Tape(stop)
    options = {"evaluation_metric": "loss", "num_epochs": 3, "observers": [tape]}
    result = grid(backend, tmp_path, pipelined, space, **options).fit(ROWS)
    assert statuses(result) == ["finished", "finished"], result.trials
    assert len(stopped) == 1 and not tape.of(WorkerLost)
    assert_replays(result)
    assert_gone(stopped)


def slow_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Take so long that an evaluation of all rows lasts for more than a second."""
    time.sleep(0.05)
    return class_loss(outputs, labels)


def slowly(params: dict[str, Any]) -> Recipe:
    return replace(pipelined({"blocks": 3, **params}), loss=slow_loss)


def test_an_evaluation_in_a_pipeline_of_which_a_device_is_killed_changes_no_bit(
    tmp_path: Path,
) -> None:
    """First the device that takes batches, and in the next evaluation the one that sums them."""
    backend = LocalBackend(1, PRELOADED, devices_per_worker=2)
    ended: list[int] = []  # evaluations, at each kill

    def kill(tape: Tape) -> None:
        number = len(tape.of(Evaluate))
        if not tape.of(Evaluate, last=True) or number > 2:
            return

        def later() -> None:
            ended.append(len(tape.of(EvaluationDone)))
            victim = devices_of(agent_of(backend))[number - 1]
            assert victim is not None
            os.kill(victim, signal.SIGKILL)

        threading.Timer(0.4, later).start()

    options = {"evaluation_metric": "loss", "validation": 0.6, "observers": [Tape(kill)]}
    space = {"model": ["mlp"], "schedule": ["1f1b"], "recompute": [True]}
    result = grid(backend, tmp_path, slowly, space, **options).fit(ROWS)
    assert ended == [0, 1], "each was killed before its evaluation had ended"
    assert statuses(result) == ["finished"], result.trials
    assert_pipelined(result, 2)
    assert_replays(result)
