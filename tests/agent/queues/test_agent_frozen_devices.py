"""A device whose process is frozen is killed and replaced, and changes no byte."""

from __future__ import annotations

import os
import queue
import signal
from typing import Any

from cerebro_hydra.agent.device.messages import Alive, Answer, Order, Profile, Ready
from cerebro_hydra.agent.device.process import (
    DeviceProcess,
    DeviceSettings,
    OnAnswer,
    OnGone,
    WorkerDevice,
    WorkerDevices,
)
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.hopper.protocol.agent_spec import LossLimits
from cerebro_hydra.testing.local_backend import fork_server
from tests.agent.byte_runs import ByteTrials
from tests.agent.queues.queue_bench import bench
from tests.agent.queues.test_agent_queue_trainer import SIZES, begin, end
from tests.agent.standins import SECONDS

SOON = LossLimits(heartbeat_interval=0.1, missed_heartbeats=30)
LARGE = 1 << 20  # bytes that no pipe holds


def test_a_frozen_device_is_replaced_and_changes_no_byte() -> None:
    trials = ByteTrials(SIZES, seconds=0.002)
    with bench(trials, len(SIZES), [4500, 4500], limits=SOON) as made:
        begin(made, trials, 3)
        made.state.wait_for_tasks(20)
        os.kill(made.devices[1].pid, signal.SIGSTOP)
        end(made, trials, 3)
        assert len(made.devices) > 2


def test_orders_for_a_frozen_device_are_not_waited_for() -> None:
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    gone: queue.SimpleQueue[WorkerDevice] = queue.SimpleQueue()
    limits = LossLimits(heartbeat_interval=0.1, missed_heartbeats=5)
    settings = DeviceSettings(
        fork_server(["transformers.modeling_utils"]), ByteTrials(SIZES), limits=limits
    )
    device = DeviceProcess(settings, Slabs(), print, lambda _, a: answers.put(a), gone.put)
    try:
        while answers.get(timeout=SECONDS) != Ready():
            pass
        os.kill(device.pid, signal.SIGSTOP)
        trial: Any = bytes(LARGE)
        device.give(Profile(trial, 0))
        assert gone.get(timeout=SECONDS) is device
    finally:
        device.kill()


class Quiet:
    """A device that does nothing but die."""

    def __init__(self, limits: LossLimits | None) -> None:
        self.limits = limits
        self.kills = 0

    def give(self, order: Order) -> None:
        """Lose the order."""

    def kill(self) -> None:
        self.kills += 1

    def close(self) -> None:
        """Be closed already."""


def test_a_device_is_ended_once_after_its_time_without_a_sign_of_life() -> None:
    limits = LossLimits(join_timeout=60.0, heartbeat_interval=0.5, missed_heartbeats=20)
    made: list[Quiet] = []

    def start(limits: LossLimits | None) -> Any:
        def device(on_answer: OnAnswer, on_gone: OnGone) -> WorkerDevice:
            made.append(Quiet(limits))
            return made[-1]

        return device

    devices = WorkerDevices([start(limits), start(limits), start(None)], print, print)
    devices.start()
    silent, talking, here = made
    for _ in range(6):
        devices.hear(talking, Alive())
        devices.age(9.0)
    assert not silent.kills, "it may take 60 s to start"
    devices.age(9.0)
    assert (silent.kills, talking.kills, here.kills) == (1, 1, 0)
    devices.age(1e9)
    assert (silent.kills, talking.kills, here.kills) == (1, 1, 0), "nobody is ended twice"
    devices.replace(silent)
    devices.age(60.0)
    assert not made[-1].kills
    devices.hear(made[-1], Alive())
    devices.age(10.0)
    assert not made[-1].kills
    devices.age(0.25)
    assert made[-1].kills == 1
