"""A device waits for what a trial has begun before anybody else takes the trial's slots."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cerebro_hydra.agent.device.device import CUDA_ASSERT, Device, DeviceMemory
from cerebro_hydra.agent.device.messages import Compute, Done, Failed, Move, Open, Opened, RunOrder
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.shards.engine.layout import Segments
from cerebro_hydra.testing.queue_worker import train
from tests.agent.device.late_runtime import LateRuntime
from tests.agent.device.test_agent_device import started
from tests.agent.standins import SECONDS

NBYTES = 64


class BegunRun:
    """Begins to add one to a shard in each task, and ten when it lets go of it; F may fail."""

    def __init__(self, runtime: LateRuntime, stays: bool, error: Exception | None) -> None:
        self.stays, self.resident = stays, False
        self._runtime, self._error = runtime, error
        self._slots: dict[int, Tensor] = {}

    def moved(self, slots: Segments) -> Segments:
        return slots

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        self._slots[shard] = slots["trainable"]

    def perform(self, task: Action) -> Done:
        self._add(task.shard, 1)
        if self._error is not None:
            raise self._error
        return Done(task)

    def unload(self, shard: int) -> tuple[Mapping[str, Any], bool]:
        self._add(shard, 10)
        del self._slots[shard]
        return {}, False

    def cancel(self) -> None:
        self._slots.clear()

    def close(self) -> None:
        pass

    def _add(self, shard: int, number: int) -> None:
        self._runtime.compute(self._slots[shard], lambda slot: slot.add_(number))


class Bench:
    """Gives orders to a device whose streams are late, and takes its answers."""

    def __init__(self, stays: bool = False, error: Exception | None = None) -> None:
        self.runtime = LateRuntime()
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        opener: Any = self
        self.open = lambda order: BegunRun(self.runtime, stays, error if order.run == 0 else None)
        memory = DeviceMemory(runtime=self.runtime)
        end = partial(self.answers.put, "ended")
        self.device = Device(opener, memory, self.answers.put, started(), end=end)
        self.device.start()
        for run in range(2):
            self.begin(run)

    def begin(self, run: int) -> None:
        spec: Any = None
        self.device.give(Open(RunOrder(run, spec, train(0, run, 1), 0, False)))
        assert self.answer() == Opened(run)

    def answer(self) -> Any:
        return self.answers.get(timeout=SECONDS)

    def order(self, run: int, kind: ActionKind, slab: np.ndarray | None = None) -> Any:
        action = Action(run, 0, kind, 0 if kind.computes else None, device=0)
        slabs = {} if slab is None else {"trainable": slab}
        self.device.give(Compute((action,)) if kind.computes else Move(action, slabs))
        return None if kind is ActionKind.DROP else self.answer()


@pytest.fixture
def made() -> Iterator[list[Bench]]:
    benches: list[Bench] = []
    yield benches
    for bench in benches:
        bench.device.close()


@pytest.mark.parametrize("stays", [False, True])
def test_what_a_task_and_its_unloading_have_begun_is_written_back(
    made: list[Bench], stays: bool
) -> None:
    made.append(bench := Bench(stays))
    slab = np.zeros(NBYTES, np.uint8)
    for kind in (ActionKind.LOAD, ActionKind.F, ActionKind.SPILL):
        bench.order(0, kind, None if kind.computes else slab)
    assert set(slab) == {11}


def test_what_a_failed_task_has_begun_ends_before_others_get_its_slots(made: list[Bench]) -> None:
    made.append(bench := Bench(error=ValueError("the user's code is wrong")))
    bench.order(0, ActionKind.LOAD, np.zeros(NBYTES, np.uint8))
    assert isinstance(bench.order(0, ActionKind.F), Failed)
    bench.answer()  # the task is over
    bench.order(0, ActionKind.DROP)
    bench.begin(2)  # after the drop, which nobody answers
    slab = np.zeros(NBYTES, np.uint8)
    bench.order(1, ActionKind.LOAD, slab)
    bench.order(1, ActionKind.F)
    bench.order(1, ActionKind.SPILL, slab)
    assert set(slab) == {11}
    assert len(bench.runtime.blocks) == 1, "both runs had the same slot"


@pytest.mark.parametrize(
    ("error", "released"), [(torch.OutOfMemoryError("CUDA"), 1), (ValueError("wrong"), 0)]
)
def test_unused_memory_is_released_after_there_was_too_little(
    made: list[Bench], error: Exception, released: int
) -> None:
    made.append(bench := Bench(error=error))
    bench.order(0, ActionKind.LOAD, np.zeros(NBYTES, np.uint8))
    assert bench.order(0, ActionKind.F).lacking == (
        "the GPU has no room for what it asked for" if released else None
    )
    bench.answer()
    bench.order(1, ActionKind.LOAD, np.zeros(NBYTES, np.uint8))
    bench.order(1, ActionKind.F)  # on the thread that had the failure
    assert bench.runtime.released == released


class CudaError(RuntimeError):
    """Stands in for torch's error, which has the code of CUDA's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"CUDA error {code}")
        self.error_code = code


@pytest.mark.parametrize("code", [CUDA_ASSERT, 700])
def test_a_device_that_is_lost_ends_and_a_trial_is_to_blame_for_an_assertion(
    made: list[Bench], code: int
) -> None:
    made.append(bench := Bench(error=CudaError(code)))
    bench.runtime.lost = True
    bench.order(0, ActionKind.LOAD, np.zeros(NBYTES, np.uint8))
    answer = bench.order(0, ActionKind.F)
    if code == CUDA_ASSERT:
        assert isinstance(answer, Failed) and "CUDA error 710" in answer.error
        answer = bench.answer()
    assert answer == "ended"
