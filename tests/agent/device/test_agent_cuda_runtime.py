"""The shell around CUDA calls what it means to, with a stand-in that notes every call.

Only a GPU proves it: see tests/gpu.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cerebro_hydra.agent.device.runtime import CudaRuntime
from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.agent.memory.pool import MappedSlabs, Slabs
from tests.agent.device.device_memory_promises import DeviceMemoryPromises, content, of, shard

SUCCESS, NO_MEMORY = 0, 2


class FakeCuda:
    """Has the names of `torch.cuda` that the shell uses, and computes at once."""

    CudaError = RuntimeError

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error = SUCCESS
        self.Stream = lambda device: f"stream {next(self._numbers)}"
        self._numbers = iter(range(9))

    def default_stream(self, device: torch.device) -> str:
        return "default"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Any:
        self.calls.append(stream)
        yield

    def Event(self, blocking: bool) -> Any:
        assert blocking
        return SimpleNamespace(
            record=lambda stream: self.calls.append(("record", stream)),
            synchronize=lambda: self.calls.append("wait"),
        )

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaError=SimpleNamespace(success=SUCCESS),
            cudaHostRegister=lambda at, nbytes, flags: self._note(("pin", at, nbytes)),
            cudaHostUnregister=lambda at: self._note(("unpin", at)),
        )

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 30 << 30, 40 << 30

    def set_per_process_memory_fraction(self, share: float, device: torch.device) -> None:
        self.calls.append(("share", share))

    def empty_cache(self) -> None:
        self.calls.append("release")

    def _note(self, call: Any) -> int:
        self.calls.append(call)
        return self.error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


@pytest.fixture
def runtime(cuda: FakeCuda) -> CudaRuntime:
    return CudaRuntime(torch.device("cpu"))


class TestShell(DeviceMemoryPromises):
    @pytest.fixture
    def memory(self, runtime: CudaRuntime) -> DeviceMemory:
        return DeviceMemory(poison=True, runtime=runtime)

    test_slots_of_one_size_are_used_again = None  # torch's allocator for GPUs does that


def test_each_way_has_a_stream_and_is_waited_for_by_its_event(
    cuda: FakeCuda, runtime: CudaRuntime
) -> None:
    memory = DeviceMemory(runtime=runtime)
    slots = memory.promote({"frozen": np.zeros(8, np.uint8)}, 4)
    assert cuda.calls == ["stream 0"] * 4 + [("record", "stream 0"), "wait"]
    cuda.calls.clear()
    memory.demote(slots, {"frozen": np.zeros(8, np.uint8)})
    assert cuda.calls == ["stream 1", ("record", "stream 1"), "wait"]
    cuda.calls.clear()
    memory.finish()
    assert cuda.calls == [("record", "default"), "wait"]
    runtime.release()
    assert cuda.calls[-1] == "release"


@pytest.mark.parametrize(("budget", "share"), [(6, (6 + 4) / 40), (39, 1.0), (None, None)])
def test_a_process_gets_its_budget_of_a_gpu_and_what_kernels_need(
    cuda: FakeCuda, budget: int | None, share: float | None
) -> None:
    CudaRuntime(torch.device("cpu"), None if budget is None else budget << 30)
    assert cuda.calls == ([] if share is None else [("share", share)])


def test_a_slab_is_unpinned_before_it_is_unmapped(cuda: FakeCuda, runtime: CudaRuntime) -> None:
    slabs, mapped = Slabs(), MappedSlabs(runtime.mapped)
    theirs = slabs.allocate(5000)
    name = slabs.name_of(theirs)

    mapped.map(name.number, os.dup(slabs.file_of(theirs)))
    reader = mapped.find(name)[7:]
    assert cuda.calls == [("pin", reader.ctypes.data - 7, 5000)]
    mapped.forget(name.number)
    gc.collect()
    assert len(cuda.calls) == 1, "somebody looks into it"
    address = reader.ctypes.data - 7
    del reader
    gc.collect()
    assert cuda.calls[1:] == [("unpin", address)]


def test_what_can_not_be_pinned_is_tried_once(
    cuda: FakeCuda, runtime: CudaRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.error = NO_MEMORY
    slab = shard(1)
    with caplog.at_level(logging.WARNING):
        assert runtime.mapped(slab["frozen"]) is slab["frozen"]
        assert runtime.mapped(slab["trainable"]) is slab["trainable"]
    assert len(cuda.calls) == 1
    (record,) = caplog.records
    assert "can't pin 4096 bytes" in record.getMessage() and "ulimit -l" in record.getMessage()
    assert content(DeviceMemory(runtime=runtime).promote(slab, 0)) == of(slab)


def test_a_gpu_that_refuses_everything_is_lost(
    cuda: FakeCuda, runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not runtime.is_lost()

    def refuse(blocking: bool) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cuda, "Event", refuse)
    assert runtime.is_lost()
