"""The server that devices are forked from is stopped, and answers nobody: no byte changes."""

from __future__ import annotations

import os
import signal
from multiprocessing import forkserver

import pytest

from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.hopper.protocol.agent_spec import LossLimits
from cerebro_hydra.plan.messages.events import TaskFailed
from cerebro_hydra.testing.local_backend import fork_server
from tests.agent.byte_visits import ByteTrials
from tests.agent.queues.queue_bench import SIZES, bench
from tests.agent.queues.test_agent_lost_devices import SOON, ready
from tests.processes import assert_gone

pytestmark = pytest.mark.slow


def stop_server() -> int:
    """Stop the server that this process's devices are forked from; return its id."""
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    return server


def test_devices_start_although_the_server_that_they_are_forked_from_is_stopped() -> None:
    with ready(ByteTrials(SIZES), Slabs(), SOON):
        server = stop_server()
        with bench(ByteTrials(SIZES), [4500, 4500], limits=SOON) as made:
            made.begin(3)
            made.end(3)
    assert_gone([server])


def test_a_device_that_dies_is_replaced_although_its_server_tells_nobody() -> None:
    with bench(ByteTrials(SIZES, seconds=0.006), [4500, 4500], limits=SOON) as made:
        made.begin(3)
        made.state.wait_for_tasks(5)
        server = stop_server()
        made.devices[1].close()
        made.end(3)
    assert_gone([server])


@pytest.mark.long
def test_a_trial_that_ends_devices_and_leaves_forks_fails_alone_though_no_server_tells() -> None:
    """What it has forked holds the pipe of its device open, as if that lived."""
    trials = ByteTrials(SIZES, seconds=0.006, faults={1: "dies and leaves a fork"})
    with bench(trials, [4500, 4500], limits=SOON) as made:
        stop_server()
        made.begin(3)
        results = made.results(3)
        failed = results.pop(1)
        assert isinstance(failed, TaskFailed)
        assert "the process of a device 3 times" in failed.error
        for trial, result in results.items():
            made.check(trial, result)


@pytest.mark.long
def test_devices_start_although_their_server_is_stopped_before_it_has_forked_any() -> None:
    """It may be loading then, and has as long as a device may take to start."""
    context = fork_server(["transformers.modeling_utils"])
    if (server := forkserver._forkserver._forkserver_pid) is not None:
        os.kill(server, signal.SIGKILL)
        assert_gone([server])
    forkserver.ensure_running()
    stopped = stop_server()
    limits = LossLimits(join_timeout=30.0, heartbeat_interval=0.1, missed_heartbeats=30)
    with bench(ByteTrials(SIZES), [4500, 4500], context=context, limits=limits) as made:
        made.begin(3)
        made.end(3)
    assert_gone([stopped])
