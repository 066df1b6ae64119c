"""Which process starts CUDA, and which GPU it sees; no GPU is needed for that."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from cerebro_hydra.agent.device import visible_gpus
from cerebro_hydra.agent.device.messages import Ready
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings, gpu_memory, gpu_starts
from cerebro_hydra.agent.device.visible_gpus import show_gpu
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.testing.local_backend import fork_server
from tests.agent.byte_visits import ByteTrials
from tests.agent.device.late_runtime import late_memory
from tests.agent.standins import SECONDS

WITHOUT_CUDA = """
import importlib, torch

def refuse(*args, **kwargs):
    raise RuntimeError("CUDA was touched")

for name in ("init", "_lazy_init", "is_available", "device_count", "current_device", "cudart"):
    setattr(torch.cuda, name, refuse)

from cerebro_hydra.agent import main
from cerebro_hydra.agent.device import process as device_process
from cerebro_hydra.spark import daemon

for name in (*device_process._PRELOADED, *daemon.PRELOADED, "cerebro_hydra.agent.device.runtime"):
    importlib.import_module(name)
"""


@pytest.mark.long
def test_what_devices_and_agents_are_forked_from_never_touches_cuda() -> None:
    """A process that is forked from one which asked CUDA for anything can't use a GPU."""
    subprocess.run([sys.executable, "-c", WITHOUT_CUDA], check=True, timeout=SECONDS)


def visible_here() -> ByteTrials:
    print(*(os.environ.get(name) for name in (visible_gpus.VISIBLE, visible_gpus.ORDER)))
    return ByteTrials((64,))


def test_the_process_of_a_gpu_sees_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    settings = DeviceSettings(
        fork_server(["transformers.modeling_utils"]), visible_here, True, late_memory,
        partial(show_gpu, "GPU-ab"),
    )  # fmt: skip
    device = DeviceProcess(
        settings, Slabs(), said.put, lambda _, answer: answers.put(answer), lambda _: None
    )
    try:
        assert answers.get(timeout=SECONDS) == Ready()
        assert "GPU-ab PCI_BUS_ID" in str(said.get(timeout=SECONDS))
    finally:
        device.close()
    assert visible_gpus.VISIBLE not in os.environ


def test_every_gpu_of_a_worker_has_a_process_that_sees_it() -> None:
    starts: list[Any] = [*gpu_starts(("5", "GPU-ab"), visible_here, Slabs(), print, budget=7)]
    given = [start.args[0] for start in starts]  # each is a DeviceProcess to be
    assert [settings.prepare.args for settings in given] == [("5",), ("GPU-ab",)]
    (memory,) = {settings.make_memory for settings in given}
    assert memory.func is gpu_memory and memory.keywords == {"budget": 7}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, None),
    ],
)
def test_a_user_decides_how_torch_allocates(
    before: dict[str, str], after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = dict(before)
    monkeypatch.setattr(visible_gpus.os, "environ", environment)
    show_gpu("3")
    assert environment.get("PYTORCH_ALLOC_CONF") == after
    assert environment[visible_gpus.VISIBLE] == "3"
