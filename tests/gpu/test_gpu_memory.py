"""The memory of a GPU keeps what every device's memory promises, and copies beside computing."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cerebro_hydra.agent.device.process import gpu_memory
from cerebro_hydra.agent.device.runtime import THE_GPU, CudaRuntime
from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.agent.memory.pool import MappedSlabs, Slabs
from cerebro_hydra.shards.engine.layout import Bytes
from tests.agent.device.device_memory_promises import DeviceMemoryPromises, content, of, shard
from tests.gpu.marks import NEEDS_GPU

pytestmark = NEEDS_GPU

MIB = 1 << 20
LONG = 2_000_000_000
"""Cycles of a GPU's clock: about a second."""


def is_pinned(buffer: Bytes) -> bool:
    return torch.from_numpy(buffer).is_pinned()


def in_thread(work: object) -> None:
    """Do what a device's receiving thread does, which computes nothing."""
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join()


class SharedSlab:
    """A slab as the process of a device maps it."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        slabs, self.mapped = Slabs(), MappedSlabs(memory.runtime.mapped)
        self._kept = slabs.allocate(nbytes)
        name, file = slabs.name_of(self._kept), os.dup(slabs.file_of(self._kept))
        in_thread(lambda: self.mapped.map(name.number, file))
        self.name = name

    @property
    def buffer(self) -> Bytes:
        return self.mapped.find(self.name)


class TestGpuMemory(DeviceMemoryPromises):
    @pytest.fixture
    def memory(self) -> Iterator[DeviceMemory]:
        yield gpu_memory(poison=True)
        torch.cuda.empty_cache()


def test_a_slab_is_pinned_as_long_as_anybody_looks_into_it() -> None:
    shared = SharedSlab(gpu_memory(), MIB)
    reader = shared.buffer[7:]
    assert is_pinned(shared.buffer) and is_pinned(reader)
    shared.mapped.forget(shared.name.number)
    gc.collect()
    assert is_pinned(reader)
    again = gpu_memory()
    del reader
    gc.collect()
    assert content(again.promote(shard(1), 0)) == of(shard(1)), "no error is left behind"


@pytest.mark.parametrize("nbytes", [0, 1, 4097])
def test_a_slab_of_any_size_can_be_pinned(nbytes: int) -> None:
    memory = gpu_memory()
    shared = SharedSlab(memory, nbytes)
    shared.buffer[:] = 7
    slots = memory.promote({"frozen": shared.buffer}, 0)
    assert content(slots) == {"frozen": bytes([7]) * nbytes}


def test_what_can_not_be_pinned_is_copied_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    runtime = CudaRuntime(THE_GPU)
    memory = DeviceMemory(runtime=runtime)
    slab = Slabs().allocate(MIB)
    slab[:] = 9
    found: list[Bytes] = []
    with caplog.at_level(logging.WARNING):
        in_thread(lambda: found.extend(runtime.mapped(slab) for _ in range(3)))  # once is enough
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -l" in caplog.text
    for buffer in found:
        assert content(memory.promote({"frozen": buffer}, 0)) == {"frozen": bytes([9]) * MIB}


def test_a_shard_comes_and_goes_while_the_gpu_computes() -> None:
    memory = gpu_memory()
    shared = SharedSlab(memory, 64 * MIB)
    slabs = {"trainable": shared.buffer}
    memory.give_up(memory.promote(slabs, 0))  # the slot is there from now on
    shared.buffer[:] = 3
    torch.cuda._sleep(LONG)
    computed = torch.cuda.Event()
    computed.record()
    slots = memory.promote(slabs, 0)
    assert not computed.query(), "the promotion has waited for the computing"
    shared.buffer[:] = 0
    memory.demote(slots, slabs)
    assert not computed.query(), "the demotion has waited for the computing"
    assert (shared.buffer == 3).all()
    memory.finish()
    assert computed.query()


def test_a_task_ends_without_a_wait_for_copies() -> None:
    runtime = CudaRuntime(THE_GPU)
    memory = DeviceMemory(runtime=runtime)
    slots = memory.promote({"frozen": np.zeros(MIB, np.uint8)}, 0)
    copies = torch.cuda.Stream()
    with torch.cuda.stream(copies):
        torch.cuda._sleep(LONG)
        copied = copies.record_event()
    slots["frozen"].add_(1)
    memory.finish()
    assert not copied.query()
    assert content(slots) == {"frozen": bytes([1]) * MIB}
    copied.synchronize()
