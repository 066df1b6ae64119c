"""A shard's bytes are right on a device and after it, however late the device's streams work."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.shards.engine.layout import Segments
from tests.agent.device.device_memory_promises import DeviceMemoryPromises
from tests.agent.device.late_runtime import LateRuntime, late_memory
from tests.examples import examples
from tests.processes import run_python

SIZES = (64, 64, 1000)


class TestHostMemory(DeviceMemoryPromises):
    @pytest.fixture
    def memory(self) -> DeviceMemory:
        return DeviceMemory(poison=True)


class TestLateMemory(DeviceMemoryPromises):
    @pytest.fixture
    def memory(self) -> DeviceMemory:
        return late_memory()


class Worked:
    """Shards that are loaded, computed with, written back and dropped, as a device does it."""

    def __init__(self) -> None:
        self.runtime = LateRuntime()
        self.memory = DeviceMemory(poison=False, runtime=self.runtime)
        self.homes = [np.full(n, k, np.uint8) for k, n in enumerate(SIZES)]
        self.slots: dict[int, Segments] = {}

    def load(self, k: int) -> None:
        self.slots[k] = self.memory.promote({"trainable": self.homes[k]}, 0)

    def compute(self, k: int) -> None:
        self.runtime.compute(self.slots[k]["trainable"], lambda slot: slot.add_(1))
        self.memory.finish()

    def spill(self, k: int) -> None:
        self.memory.demote(self.slots[k], {"trainable": self.homes[k]})
        self.drop(k)

    def drop(self, k: int) -> None:
        self.memory.give_up(self.slots.pop(k))

    def seen(self, k: int) -> bytes:
        return bytes(self.slots[k]["trainable"].numpy() if k in self.slots else self.homes[k])


class Moves(RuleBasedStateMachine):
    """Work with shards in any order, and compare each with what it has to be."""

    def __init__(self) -> None:
        super().__init__()
        self.worked = Worked()
        self.known = [home.copy() for home in self.worked.homes]

    def pick(self, which: int) -> int:
        there = sorted(self.worked.slots)
        return there[which % len(there)]

    @precondition(lambda self: len(self.worked.slots) < len(SIZES))
    @rule(which=st.integers(0, 9))
    def load(self, which: int) -> None:
        absent = [k for k in range(len(SIZES)) if k not in self.worked.slots]
        self.worked.load(absent[which % len(absent)])

    @precondition(lambda self: self.worked.slots)
    @rule(which=st.integers(0, 9))
    def compute(self, which: int) -> None:
        k = self.pick(which)
        self.worked.compute(k)
        self.known[k] += 1

    @precondition(lambda self: self.worked.slots)
    @rule(which=st.integers(0, 9))
    def spill(self, which: int) -> None:
        self.worked.spill(self.pick(which))

    @precondition(lambda self: self.worked.slots)
    @rule(which=st.integers(0, 9))
    def drop(self, which: int) -> None:
        k = self.pick(which)
        self.worked.drop(k)
        self.known[k] = self.worked.homes[k].copy()

    @invariant()
    def every_byte_is_what_it_has_to_be(self) -> None:
        for k, known in enumerate(self.known):
            assert self.worked.seen(k) == bytes(known)


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=examples(100), stateful_step_count=20)


@pytest.mark.parametrize("stream", [None, "promoting", "demoting", "computing"])
def test_a_wait_that_is_left_out_is_seen(
    stream: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = Worked()
    waits = {"promoting", "demoting", "computing"}
    if stream is not None:
        monkeypatch.setattr(getattr(worked.runtime, stream), "wait", lambda: None)
        waits.remove(stream)
    worked.load(0)
    worked.compute(0)
    worked.spill(0)
    worked.load(1)  # into the slot of the other one
    for name in waits:
        getattr(worked.runtime, name).wait()
    right = worked.seen(0) == bytes([1] * 64) and worked.seen(1) == bytes([1] * 64)
    assert right is (stream is None)


SLOTS = """
from pathlib import Path
import numpy as np
from cerebro_hydra.agent.device.runtime import HostRuntime

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) >> 10

np.ones(16 << 20, np.uint8)  # from now on the heap has blocks of this size
before, runtime, between = resident(), HostRuntime(), []
for _ in range(20):
    slot = runtime.empty(3 << 20).fill_(1)
    between += [slot, np.ones(100_000, np.uint8)]
print(resident() - before)
del slot, between[::2]
runtime.release()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what is resident")
def test_slots_that_are_given_back_leave_no_gaps_between_other_memory() -> None:
    with_slots, without = map(int, run_python("-c", SLOTS).stdout.split())
    assert without < 8 < 55 < with_slots
