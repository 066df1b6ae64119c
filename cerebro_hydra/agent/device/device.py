"""A device carries out actions: it computes on one thread and moves shards on two others.

::

    orders ──┬── F, B, U ──► computing thread ──┐
             ├── LOAD ─────► promoting thread ──┼──► answers
             └── SPILL ────► demoting thread ───┘

Its orders come from the agent, either in the agent's own process or through a pipe.

Its memory is slots that shards are copied into, and back from.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

from cerebro_hydra.agent.device.logs import current_trial
from cerebro_hydra.agent.device.messages import (
    Answer,
    Close,
    Closed,
    Compute,
    Computed,
    Done,
    Failed,
    Forget,
    Move,
    Open,
    Opened,
    Order,
    Profile,
    Profiled,
    RunOrder,
)
from cerebro_hydra.agent.device.runtime import DeviceRuntime, HostRuntime
from cerebro_hydra.agent.device.task_watch import Task
from cerebro_hydra.agent.memory.out_of_memory import memory_that_ran_out
from cerebro_hydra.agent.memory.pool import POISON
from cerebro_hydra.errors import StepDiffers
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.shards.admission.profile import TrialProfile
from cerebro_hydra.shards.engine.layout import Bytes, Segments, memory_of
from cerebro_hydra.shards.engine.pass_record import PassRecord
from cerebro_hydra.storage.run_document import TrialSpec

Key = tuple[int, int]  # run and shard
Cursor = Mapping[str, Any]

CUDA_ASSERT = 710
"""`cudaErrorAssert`: a kernel found an argument wrong, such as an index, and the device is lost."""

_ASSERTION = "device-side assert"  # where torch gives no code

_log = logging.getLogger(__name__)


class Device:
    """Carries out the orders for one device. `give` is thread-safe and returns at once.

    An error of a trial's code is told once; what else is ordered of the run is answered without
    being done.

    Args:
        opener: builds trials and opens runs of them.
        memory: has the device's slots.
        answer: takes what is to be told, from any thread.
        double_buffering: whether shards are moved beside the computing.
        begin: is told of the attempt whose trial's code runs next, if it is another one.
        end: ends the process, whose device is lost.
    """

    def __init__(
        self,
        opener: RunOpener,
        memory: DeviceMemory,
        answer: Callable[[Answer], object],
        *,
        double_buffering: bool = True,
        begin: Callable[[int], object] | None = None,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        self._begin, self._end = begin, end
        self._begun = -1
        self._opener = opener
        self._memory = memory
        self._answer = answer
        self._runs: dict[int, DeviceRun] = {}
        self._tasks: dict[int, Task] = {}  # of the runs
        self._over: set[int] = set()  # runs that failed or were closed
        self._slots: dict[Key, Segments] = {}
        self._unbound: dict[Key, tuple[Cursor | None, bool]] = {}  # what unloading gave
        self._computing = _Lane("device-computes")
        self._promoting = self._demoting = self._computing
        if double_buffering:
            self._promoting, self._demoting = _Lane("device-promotes"), _Lane("device-demotes")

    def start(self) -> None:
        """Begin to work."""
        for lane in self._lanes:
            lane.start()

    def close(self) -> None:
        """End the threads after what they are doing."""
        for lane in self._lanes:
            lane.close()

    @property
    def _lanes(self) -> set[_Lane]:
        return {self._computing, self._promoting, self._demoting}

    def give(self, order: Order) -> None:
        """Take an order; those of one thread are carried out one after the other."""
        match order:
            case Profile():
                self._computing.put(partial(self._profile, order))
            case Forget():
                self._computing.put(partial(self._opener.forget, order.trial))
            case Open():
                self._over.discard(order.order.run)
                self._computing.put(partial(self._open, order.order))
            case Close():
                self._over.add(order.run)
                self._computing.put(partial(self._close, order))
            case Compute():
                self._computing.put(partial(self._compute, order))
            case Move():
                key = (order.action.trial, order.action.shard)
                bound = order.action.kind is not ActionKind.LOAD and key not in self._unbound
                lane = self._computing if bound else self._lane_of(order.action)
                lane.put(partial(self._move, order))
                if bound and order.action.kind is ActionKind.DROP:
                    freed = threading.Event()
                    lane.put(freed.set)
                    self._promoting.put(freed.wait)  # the LOAD after it takes its place

    # ------------------------------------------------------------------ runs

    @contextmanager
    def _code_of(self, trial: int, attempt: int) -> Iterator[None]:
        """Let the body run code of a trial, because an attempt asks for it."""
        if self._begin is not None and attempt != self._begun:
            self._begun = attempt
            self._begin(attempt)
        with current_trial(trial):
            yield

    def _profile(self, order: Profile) -> None:
        trial = order.trial.trial
        with self._code_of(trial, order.attempt):
            try:
                profile = self._opener.profile(order.trial)
            except (Exception, SystemExit) as error:
                self._fail(None, trial, error)
            else:
                self._answer(Profiled(trial, profile))

    def _open(self, order: RunOrder) -> None:
        self._tasks[order.run] = order.task
        with self._code_of(order.task.trial, order.task.attempt):
            try:
                self._runs[order.run] = self._opener.open(order)
            except (Exception, SystemExit) as error:
                self._fail(order.run, order.task.trial, error)
        self._answer(Opened(order.run))

    def _close(self, order: Close) -> None:
        run = self._runs.pop(order.run, None)
        if order.cancelled:
            if run is not None:
                run.cancel()
            return
        evaluation = None
        try:
            evaluation = None if run is None else run.close()
        except (Exception, SystemExit) as error:
            self._fail(order.run, self._tasks[order.run].trial, error)
        self._answer(Closed(order.run, evaluation))

    def _fail(self, number: int | None, trial: int, error: BaseException) -> None:
        """Tell of an error that only the trial's own code can have caused.

        A device that is lost ends. That is no fault of the trial unless an assertion of its own
        failed there; what else it may be is found out when the run begins again.
        """
        story = "".join(traceback.format_exception(error))
        lost = self._memory.runtime.is_lost()
        if lost and not _is_assertion(error):
            _log.error("the device is lost, and starts again: %s", story)
            self._end()
            return
        if isinstance(error, StepDiffers):
            story = str(error)
        if number is not None:
            self._over.add(number)
            self._computing.put(partial(self._close, Close(number, cancelled=True)))
        lacking = memory_that_ran_out(error)
        self._computing.put(partial(self._collect, lacking is not None))
        self._answer(Failed(number, trial, type(error).__name__, story, lacking))
        if lost:
            self._end()

    def _collect(self, lacking: bool) -> None:
        """Let go of what a trial has left behind, and of all unused memory if there was too little.

        What is ordered after a failure finds it gone.
        """
        gc.collect()  # frames can refer to the trial's memory in a circle
        if lacking:
            self._memory.runtime.release()

    # ------------------------------------------------------------------ actions

    def _compute(self, unit: Compute) -> None:
        dones = []
        for task in unit.tasks:
            begun, done = time.perf_counter(), Done(task)
            if task.trial not in self._over:
                asked = self._tasks[task.trial]
                try:
                    with self._code_of(asked.trial, asked.attempt):
                        done = self._perform(task, unit)
                except (Exception, SystemExit) as error:
                    self._fail(task.trial, asked.trial, error)
            dones.append(replace(done, seconds=time.perf_counter() - begun))
        self._answer(Computed(tuple(dones)))

    def _perform(self, task: Action, unit: Compute) -> Done:
        key, run = (task.trial, task.shard), self._runs[task.trial]
        first, last, unbound = task is unit.tasks[0], task is unit.tasks[-1], None
        try:
            if first and unit.record is not None:
                cast(MovingDeviceRun, run).take_up(task, unit.slabs["boundary"], unit.record)
            if key in self._unbound:
                cursor, _ = self._unbound.pop(key)
                run.load(task.shard, self._slots[key], cursor)
            done = run.perform(task)
            if last and not run.stays:
                unbound = run.unload(task.shard)
            if last and unit.record is not None:
                done = replace(done, record=cast(MovingDeviceRun, run).put_down())
        finally:  # whoever takes these slots next need not ask who uses them
            self._memory.finish()
        if unbound is not None:
            self._unbound[key] = unbound
        return done

    def _move(self, order: Move) -> None:
        """Move a shard; one that a run stays bound to is let go of by the computing thread."""
        action, begun = order.action, time.perf_counter()
        key, done = (action.trial, action.shard), Done(action)
        try:
            if action.trial in self._over:
                self._give_up(key)
            elif action.kind is ActionKind.LOAD:
                self._slots[key] = self._memory.promote(order.slabs, order.gradients)
                self._unbound[key] = order.cursor, False
            else:
                if key not in self._unbound:
                    unbound = self._runs[action.trial].unload(action.shard)
                    self._memory.finish()
                    self._unbound[key] = unbound
                    if action.kind is ActionKind.SPILL:
                        self._demoting.put(partial(self._move, order))
                        return
                cursor, has_gradients = self._unbound[key]
                if action.kind is ActionKind.SPILL:
                    self._memory.demote(self._slots[key], order.slabs)
                self._give_up(key)
                done = replace(done, cursor=cursor, has_gradients=has_gradients)
        except (Exception, SystemExit) as error:
            self._fail(action.trial, self._tasks[action.trial].trial, error)
        if action.kind is not ActionKind.DROP:
            moved = sum(slab.nbytes for slab in order.slabs.values())
            self._answer(replace(done, seconds=time.perf_counter() - begun, nbytes=moved))

    def _lane_of(self, move: Action) -> _Lane:
        """Return the lane of a move; DROP gives a place up that the LOAD after it may take."""
        return self._demoting if move.kind is ActionKind.SPILL else self._promoting

    def _give_up(self, key: Key) -> None:
        self._unbound.pop(key, None)
        if (slots := self._slots.pop(key, None)) is not None:
            self._memory.give_up(slots)


def _is_assertion(error: BaseException) -> bool:
    return getattr(error, "error_code", None) == CUDA_ASSERT or _ASSERTION in str(error)


class _Lane:
    """Does one thing after the other on a thread of its own, once it is started."""

    def __init__(self, name: str) -> None:
        self._items: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._items.put(work)

    def close(self) -> None:
        self._items.put(None)

    def _run(self) -> None:
        while (work := self._items.get()) is not None:
            work()
            del work  # its slabs are given back before the next order comes


class DeviceMemory:
    """Lends slots, each of which holds a segment. Thread-safe.

    Every copy is complete when it returns, and `finish` says that of a task. So streams never meet
    on a slot: whoever uses it next was told so after the one before it had been waited for.

    Args:
        poison: overwrite a slot that is given up, so that a test sees whoever still reads it.
        runtime: has the device's bytes and streams; None is a CPU device.
    """

    def __init__(self, poison: bool = False, runtime: DeviceRuntime | None = None) -> None:
        self._poison = poison
        self.runtime = HostRuntime(poison) if runtime is None else runtime
        self._lock = threading.Lock()
        self._used = 0
        self._peak = 0

    @property
    def peak(self) -> int:
        """Return the most bytes that slots had at once."""
        return self._peak

    def promote(self, slabs: Mapping[str, Bytes], gradients: int) -> Segments:
        """Return slots with the content of slabs, and one of zeros for gradients if it is named."""
        sizes = {name: slab.nbytes for name, slab in slabs.items()}
        if gradients:
            sizes.setdefault("gradients", gradients)
        slots = {name: self.runtime.empty(nbytes) for name, nbytes in sizes.items()}
        stream = self.runtime.promoting
        for name, slot in slots.items():
            if name in slabs:
                stream.copy(slot, memory_of(slabs[name]))
            else:
                stream.fill(slot, 0)
        stream.wait()
        self._count(_nbytes(slots))
        return slots

    def demote(self, slots: Segments, slabs: Mapping[str, Bytes]) -> None:
        """Copy slots into the slabs of their names."""
        stream = self.runtime.demoting
        for name in slots.keys() & slabs.keys():
            stream.copy(memory_of(slabs[name]), slots[name])
        stream.wait()

    def give_up(self, slots: Segments) -> None:
        """Note that nobody may read the slots any more."""
        self._count(-_nbytes(slots))
        if self._poison:
            for slot in slots.values():
                self.runtime.demoting.fill(slot, POISON)
            self.runtime.demoting.wait()

    def finish(self) -> None:
        """Wait until the device has computed what it was told."""
        self.runtime.computing.wait()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._used += nbytes
            self._peak = max(self._peak, self._used)


def _nbytes(slots: Segments) -> int:
    return sum(slot.nbytes for slot in slots.values())


class DeviceRun(Protocol):
    """One sub-epoch or evaluation on a device; the device's computing thread uses it.

    Attributes:
        stays: whether shards are bound to their slots for longer than a unit.
    """

    stays: bool

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Take a shard, which lies in the slots; "gradients" is one of them if it has some."""
        ...

    def unload(self, shard: int) -> tuple[Mapping[str, Any] | None, bool]:
        """Let go of a shard; return its cursor, and whether it has gradients in their slot."""
        ...

    def perform(self, task: Action) -> Done:
        """Do F, B or U of a shard, and return what is told of it."""
        ...

    def close(self) -> Evaluation | None:
        """End the run after its last task, or say why its results can't be used."""
        ...

    def cancel(self) -> None:
        """End the run where it stands."""
        ...


class MovingDeviceRun(DeviceRun, Protocol):
    """One sub-epoch, of which the device does some units and other devices do others."""

    def take_up(self, task: Action, slab: Bytes, record: PassRecord) -> None:
        """Begin a unit, by its first task, where the record says what the slab has for it."""
        ...

    def put_down(self) -> PassRecord:
        """End a unit, whose shard is unloaded; return what the slab has after it."""
        ...


class RunOpener(Protocol):
    """Builds trials in the process of a device."""

    def profile(self, trial: TrialSpec) -> TrialProfile:
        """Build a trial, unless it was built before, and describe it."""
        ...

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        ...

    def open(self, order: RunOrder) -> DeviceRun:
        """Return a run of a trial."""
        ...
