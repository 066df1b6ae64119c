"""Slabs: memory that processes share, of which there may be many."""

from __future__ import annotations

import gc
import queue
import resource
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.queue_worker import train
from cerebro_hydra.agent.device.messages import Alive, Move, Open, VisitOrder
from cerebro_hydra.agent.device.process import DeviceProcess, DeviceSettings
from cerebro_hydra.agent.memory.pool import Slabs
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.testing.local_backend import fork_server
from tests.agent.byte_visits import ByteTrials
from tests.agent.standins import SECONDS


@pytest.fixture
def few_files() -> Iterator[int]:
    """Allow fewer open files than a shell usually does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_slabs_than_a_process_may_open_files_by_default(few_files: int) -> None:
    slabs = Slabs()
    made = [slabs.allocate(1) for _ in range(few_files)]
    assert len({slabs.name_of(each).number for each in made}) == few_files


def mapped(pid: int) -> int:
    """Return how many slabs a process can see."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:cerebro-hydra-slab")


def test_a_device_lets_go_of_the_slabs_that_its_agent_has_no_more() -> None:
    slabs, answers = Slabs(), queue.SimpleQueue[Any]()
    context = fork_server(["transformers.modeling_utils"])
    settings = DeviceSettings(context, partial(ByteTrials, (64,)))
    device = DeviceProcess(
        settings, slabs, print, lambda _, answer: answers.put(answer), lambda _: None
    )

    def answer() -> Any:
        while isinstance(found := answers.get(timeout=SECONDS), Alive):
            pass
        return found

    def begin(run: int) -> None:
        spec: Any = None
        device.give(Open(VisitOrder(run, spec, train(run, run, 1), 0, recompute=False)))
        answer()

    def shard(*names: str) -> dict[str, np.ndarray]:
        return {name: slabs.allocate(64) for name in names}

    try:
        answer()  # it is ready
        begin(0)
        for kind, names in (
            (ActionKind.LOAD, ("frozen", "trainable")),
            (ActionKind.SPILL, ("trainable",)),
        ):
            device.give(Move(Action(0, 0, kind, device=0), shard(*names), {"step": 0}))
            answer()
        assert mapped(device.pid) > 0
        gc.collect()
        begin(1)
        assert mapped(device.pid) == 0
    finally:
        device.close()


def private_pages() -> int:
    """Return the MiB of this process that no other one shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) >> 10


def collects() -> ByteTrials:
    before = private_pages()
    gc.collect()
    print(f"copied {private_pages() - before} MiB")
    return ByteTrials((64,))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which pages are shared")
def test_a_collection_in_a_device_copies_none_of_what_its_server_shares() -> None:
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    settings = DeviceSettings(fork_server(["transformers.modeling_utils"]), collects)
    device = DeviceProcess(settings, Slabs(), said.put, lambda *_: None, lambda _: None)
    try:
        line = said.get(timeout=SECONDS)["output"]["line"]
        assert int(line.split()[1]) < 8, line
    finally:
        device.close()
