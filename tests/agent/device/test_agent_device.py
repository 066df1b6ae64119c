"""A device moves shards beside its computing, waits for its streams, and says whose code runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.queue_worker import train
from cerebro_hydra.agent.device import logs
from cerebro_hydra.agent.device.device import CUDA_ASSERT, Device
from cerebro_hydra.agent.device.messages import (
    Close,
    Closed,
    Compute,
    Computed,
    Done,
    Failed,
    Losses,
    Move,
    Open,
    Opened,
    Profile,
    Profiled,
    VisitOrder,
)
from cerebro_hydra.agent.device.runtime import Lane
from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.agent.device.worker_devices import WorkerDevices
from cerebro_hydra.agent.memory.out_of_memory import REMEDY
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.engine.layout import Bytes, Segments
from tests.agent.byte_visits import ByteTrials
from tests.agent.device.late_runtime import LateRuntime
from tests.agent.standins import SECONDS

NBYTES = 64
F, B, LOAD, SPILL, DROP = (ActionKind[name] for name in ("F", "B", "LOAD", "SPILL", "DROP"))


def action(visit: int, kind: ActionKind, shard: int = 0) -> Action:
    return Action(visit, shard, kind, 0 if kind.computes else None, device=0)


def slabs(mark: int = 0) -> dict[str, Bytes]:
    return {name: np.full(NBYTES, mark, np.uint8) for name in ("frozen", "trainable")}


class GivenDevice:
    """A device that computes on a thread, and takes orders of visits 0, 1, ... of such trials."""

    def __init__(
        self,
        trials: Any,
        memory: DeviceMemory | None = None,
        lane: Lane | None = None,
        begin: Callable[[int], object] = lambda _: None,
        end: Callable[[], object] = lambda: None,
        double_buffering: bool = True,
    ) -> None:
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        computing = lane or Lane("device-computes")
        memory = memory or DeviceMemory(poison=True)
        owner: Any = SimpleNamespace(
            answer=self.answers.put,
            answer_soon=self.answers.put,
            flush=lambda: None,
            begin=begin,
            end=end,
        )
        self.device = Device(trials, memory, owner, computing, double_buffering)
        self.give = self.device.give
        computing.start(end)
        self.device.start()

    def open(self, *visits: int, attempts: int = 0, **order: Any) -> None:
        """Let the device open visits, which recompute unless the order says otherwise."""
        spec: Any = None
        for visit in visits:
            task = train(attempts + visit, visit, 1)
            self.give(Open(VisitOrder(visit, spec, task, 0, **{"recompute": True, **order})))
            self.wait_for(Opened(visit))

    def order(self, visit: int, kind: ActionKind, at: Any = None, shard: int = 0) -> None:
        """Let the device do a task or a move, between a slot and these slabs."""
        what = action(visit, kind, shard)
        self.give(Compute((what,)) if kind.computes else Move(what, at or {}, {"step": 0}))

    def do(self, visit: int, kind: ActionKind, at: Any = None, shard: int = 0) -> None:
        """Order it, and wait until it is done."""
        self.order(visit, kind, at, shard)
        self.wait_for(action(visit, kind, shard))

    def answer(self) -> Any:
        return self.answers.get(timeout=SECONDS)

    def wait_for(self, what: Any) -> None:
        """Pass over answers until one is this, or tells of this action."""
        found = None
        while found != what:
            answer = self.answer()
            (done,) = answer.tasks if isinstance(answer, Computed) else (answer,)
            found = getattr(done, "action", done)


@pytest.fixture
def given() -> Iterator[Callable[..., GivenDevice]]:
    made: list[GivenDevice] = []

    def make(*args: Any, **options: Any) -> GivenDevice:
        made.append(GivenDevice(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.device.close()


Given = Callable[..., GivenDevice]


class PatientMemory(DeviceMemory):
    """Writes nothing back before two shards were brought."""

    def __init__(self) -> None:
        super().__init__(poison=True)
        self._brought = threading.Semaphore(0)

    def promote(self, slabs: Mapping[str, Bytes], gradients: int) -> Segments:
        slots = super().promote(slabs, gradients)
        self._brought.release()
        return slots

    def demote(self, slots: Segments, slabs: Mapping[str, Bytes]) -> None:
        assert all(self._brought.acquire(timeout=SECONDS) for _ in range(2)), "nothing was brought"
        super().demote(slots, slabs)


def test_a_shard_is_brought_while_another_one_is_written_back(given: Given) -> None:
    device = given(ByteTrials((NBYTES, NBYTES)), PatientMemory())
    device.open(0)
    device.do(0, LOAD, slabs())
    device.order(0, SPILL, slabs())
    device.order(0, LOAD, slabs(), shard=1)
    done = [device.answer() for _ in range(2)]
    assert all(isinstance(each, Done) for each in done)
    assert {each.action for each in done} == {action(0, SPILL), action(0, LOAD, 1)}


class CountingMemory(DeviceMemory):
    """Counts the shards that have slots."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.brought, self.computing = threading.Event(), threading.Event()

    def promote(self, slabs: Mapping[str, Bytes], gradients: int) -> Segments:
        self.now += 1
        self.most = max(self.most, self.now)
        self.brought.set()
        return super().promote(slabs, gradients)

    def give_up(self, slots: Segments) -> None:
        self.now -= 1
        super().give_up(slots)


@pytest.mark.parametrize("cancelled", [True, False])
def test_no_shard_is_brought_before_the_one_whose_place_it_takes_is_given_up(
    given: Given, cancelled: bool
) -> None:
    memory = CountingMemory()

    def compute(trial: int) -> None:
        """Go on, for trial 1, until one more shard is brought, or it is clear that none will be."""
        if trial == 1:
            memory.brought.clear()
            memory.computing.set()
            memory.brought.wait(0.3)

    device = given(ByteTrials((NBYTES,), hooks={"forward": compute}), memory)
    device.open(0, 1, 2, recompute=False)
    for visit in range(2):
        device.do(visit, LOAD, slabs())
    device.do(0, F)
    device.order(1, F)
    assert memory.computing.wait(SECONDS)
    if cancelled:
        device.give(Close(0, cancelled=True))
    device.order(0, DROP)
    device.do(2, LOAD, slabs())
    assert memory.most == 2


def test_it_names_the_attempt_whose_code_runs_not_the_one_that_came_last(given: Given) -> None:
    begun: list[int] = []
    device = given(ByteTrials((NBYTES,)), begin=begun.append)
    spec: Any = SimpleNamespace(trial=0)
    device.give(Profile(spec, attempt=10))
    device.open(0, 1, attempts=10)
    for visit in range(2):
        device.do(visit, LOAD, slabs())
    for visit, kind in ((0, F), (0, B), (1, F)):
        device.do(visit, kind)
    assert begun == [10, 11, 10, 11]


def test_a_unit_of_a_run_that_is_over_is_nobodys_code(given: Given) -> None:
    begun: list[int] = []
    device = given(ByteTrials((NBYTES,)), begin=begun.append)
    device.open(0, 1, attempts=10)
    device.give(Close(0, cancelled=True))
    device.do(0, F)
    assert begun == [10, 11], "no attempt is said to begin that was taken back"
    assert logs._trial is None, "what is printed from now on is of no trial"


@pytest.mark.parametrize("double_buffering", [True, False])
def test_of_runs_that_ended_failed_or_were_cancelled_nothing_is_left(
    given: Given, double_buffering: bool
) -> None:
    faults = dict.fromkeys(range(1, 12, 3), "raises")
    made = given(ByteTrials((NBYTES,), faults=faults), double_buffering=double_buffering)
    for visit in range(12):
        made.open(visit)
        made.do(visit, LOAD, slabs())
        made.do(visit, F)
        if visit in faults:
            made.do(visit, B)
        if visit % 3:
            made.give(Close(visit, cancelled=True))
            made.do(visit, F)  # comes late, and is answered
        made.order(visit, DROP)
        if not visit % 3:
            made.give(Close(visit))
            made.wait_for(Closed(visit, Evaluation({"loss": (0.0, 0)}, {})))
    for lane in made.device._lanes:
        done = threading.Event()
        lane.put(done.set)
        assert done.wait(SECONDS)
    made.device.close()
    values = vars(made.device).items()
    kept = {name: value for name, value in values if isinstance(value, dict | set | list)}
    assert kept and not any(kept.values()), kept


# ---------------------------------------------------------------------- streams that are late


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

    def perform(self, task: Action) -> tuple[Action, Losses]:
        self._add(task.shard, 1)
        if self._error is not None:
            raise self._error
        return task, {}

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


@pytest.fixture
def late(given: Given) -> Callable[..., GivenDevice]:
    """Make a device whose streams are late; run 0 may fail."""

    def make(
        runtime: LateRuntime, stays: bool = False, error: Exception | None = None
    ) -> GivenDevice:
        opens = lambda order: BegunRun(runtime, stays, None if order.visit else error)  # noqa: E731
        trials = SimpleNamespace(open=opens)
        device = given(trials, DeviceMemory(runtime=runtime), end=lambda: answers.put("ended"))
        answers = device.answers
        device.open(0, 1)
        return device

    return make


def slab() -> dict[str, Bytes]:
    return {"trainable": np.zeros(NBYTES, np.uint8)}


@pytest.mark.parametrize("stays", [False, True])
def test_what_a_task_and_its_unloading_have_begun_is_written_back(late: Given, stays: bool) -> None:
    device, at = late(LateRuntime(), stays), slab()
    device.do(0, LOAD, at)
    device.do(0, F)
    device.do(0, SPILL, at)
    assert set(at["trainable"]) == {11}


def test_what_a_failed_task_has_begun_ends_before_others_get_its_slots(late: Given) -> None:
    runtime, at = LateRuntime(), slab()
    device = late(runtime, error=ValueError("the user's code is wrong"))
    device.do(0, LOAD, slab())
    device.order(0, F)
    assert isinstance(device.answer(), Failed)
    device.answer()  # the task is over
    device.order(0, DROP)
    device.open(2)  # after the drop, which nobody answers
    device.do(1, LOAD, at)
    device.do(1, F)
    device.do(1, SPILL, at)
    assert set(at["trainable"]) == {11}
    assert len(runtime.blocks) == 1, "both runs had the same slot"


@pytest.mark.parametrize(
    ("error", "released"), [(torch.OutOfMemoryError("CUDA"), 1), (ValueError("wrong"), 0)]
)
def test_unused_memory_is_released_after_there_was_too_little(
    late: Given, error: Exception, released: int
) -> None:
    runtime = LateRuntime()
    device = late(runtime, error=error)
    device.do(0, LOAD, slab())
    device.order(0, F)
    told = f"the GPU has no room for what it asked for; {REMEDY}" if released else None
    assert device.answer().lacking == told
    device.answer()
    device.do(1, LOAD, slab())
    device.do(1, F)  # on the thread that had the failure
    assert runtime.released == released


class CudaError(RuntimeError):
    """Stands in for torch's error, which has the code of CUDA's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"CUDA error {code}")
        self.error_code = code


@pytest.mark.parametrize("code", [CUDA_ASSERT, 700])
def test_a_device_that_is_lost_ends_and_a_trial_is_to_blame_for_an_assertion(
    late: Given, code: int
) -> None:
    runtime = LateRuntime()
    device = late(runtime, error=CudaError(code))
    runtime.lost = True
    device.do(0, LOAD, slab())
    device.order(0, F)
    answer = device.answer()
    if code == CUDA_ASSERT:
        assert isinstance(answer, Failed) and "CUDA error 710" in answer.error
        answer = device.answer()
    assert answer == "ended"


# ---------------------------------------------------------------------- in the agent's memory


class WatchedLane(Lane):
    """Calls something after each thing that it did."""

    def __init__(self) -> None:
        super().__init__("main")
        self.after: Callable[[], object] = lambda: None

    def step(self) -> bool:
        more = super().step()
        self.after()
        return more


def test_a_unit_that_comes_right_before_its_run_is_cancelled_is_answered(given: Given) -> None:
    lane, memory = WatchedLane(), DeviceMemory(in_place=True)
    device = given(ByteTrials((NBYTES,)), memory, lane, double_buffering=False)
    device.open(0, recompute=False, resident=True)
    device.do(0, LOAD, slabs())
    device.do(0, F)  # the call goes on, and waits for what comes after it
    lane.after = lambda: device.give(Close(0, cancelled=True))  # before the call looks for it
    device.do(0, B)


@pytest.mark.parametrize("failed", [False, True])
def test_a_profile_may_be_answered_after_what_was_asked_later(failed: bool) -> None:
    asked: list[Any] = []
    device: Any = SimpleNamespace(limits=None, give=asked.append)
    devices = WorkerDevices([lambda *hears: device], lambda *told: None, lambda *told: None)
    devices.start()
    trial: Any = SimpleNamespace(trial=1)
    profile, unit = Profile(trial, 0), Compute((action(0, F),))
    for order in (profile, unit, Close(0)):
        devices.ask(device, order)
    nothing: Any = None
    answer = Failed(None, 1, nothing, "why") if failed else Profiled(1, nothing)
    assert devices.hear(device, Computed(())) is unit
    assert devices.hear(device, answer) is profile
    assert devices.hear(device, Closed(0, None)) == Close(0)
