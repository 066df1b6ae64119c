"""A device carries out actions: it computes on one thread and moves shards on two others.

::

    orders ──┬── F, B, U ──► computing thread ──┐
             ├── LOAD ─────► promoting thread ──┼──► answers
             └── SPILL ────► demoting thread ───┘

Its orders come from the agent, either in the agent's own process or through a pipe. Without double
buffering one thread does everything; that of an agent's own device is the agent's main thread.

Its memory is slots that shards are copied into, and back from. A device without a budget in the
agent's own process computes in the agent's memory itself.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

from cerebro_hydra.agent.device.logs import attribute_to
from cerebro_hydra.agent.device.messages import (
    Answer,
    Close,
    Closed,
    Compute,
    Computed,
    Done,
    Failed,
    FailureKind,
    Forget,
    Losses,
    Move,
    Open,
    Opened,
    Order,
    Profile,
    Profiled,
    VisitOrder,
    copy_of,
    home_of,
)
from cerebro_hydra.agent.device.runtime import Lane
from cerebro_hydra.agent.device.slots import DeviceMemory
from cerebro_hydra.agent.device.task_watch import Task
from cerebro_hydra.agent.memory.out_of_memory import memory_that_ran_out
from cerebro_hydra.errors import Cancelled, StepDiffers
from cerebro_hydra.foreign_text import attribute_of, error_text, is_error, traceback_text
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.recipe import Evaluation
from cerebro_hydra.recipe.shared_settings import shared_settings_kept
from cerebro_hydra.shards.admission.trial_profile import TrialProfile
from cerebro_hydra.shards.engine.differences import TensorDigests
from cerebro_hydra.shards.engine.graph_passes import PassRecord
from cerebro_hydra.shards.engine.layout import Bytes, Segments, memory_of
from cerebro_hydra.shards.heap import LEAST_TRIMMED, trim_heap, trim_now_and_then
from cerebro_hydra.storage.run_document import TrialSpec

Key = tuple[int, int]  # visit and shard
Cursor = Mapping[str, Any]

CUDA_ASSERT = 710
"""`cudaErrorAssert`: a kernel found an argument wrong, such as an index, and the device is lost."""

_ASSERTION = "device-side assert"  # where torch gives no code

_log = logging.getLogger(__name__)


class _Given:
    """Notes what was done of a unit."""

    def __init__(self, unit: Compute) -> None:
        self.unit = unit
        self.dones: list[Done] = []
        self.cursor: Cursor | None = None  # of the shard that was copied before the present task
        self._left = deque(unit.tasks)
        self._begun = time.perf_counter()

    def take(self) -> Action | None:
        """Return the next task, None after the last one."""
        return self._left.popleft() if self._left else None

    @property
    def is_last(self) -> bool:
        """Return whether no task comes after the one that was taken."""
        return not self._left

    def end(
        self,
        task: Action,
        losses: Losses,
        digests: TensorDigests | None,
        record: PassRecord | None = None,
    ) -> None:
        """Note what a task gave."""
        now = time.perf_counter()
        seconds, self._begun = now - self._begun, now
        cursor, self.cursor = self.cursor, None
        self.dones.append(
            Done(task, seconds, cursor=cursor, losses=losses, digests=digests, record=record)
        )

    def answer(self) -> Computed:
        """Return what all tasks gave; those that were not done gave nothing."""
        rest = self.unit.tasks[len(self.dones) :]
        return Computed((*self.dones, *map(Done, rest)))


class Device:
    """Carries out the orders for one device. `give` is thread-safe and returns at once.

    An error of a trial's code is told once; what else is ordered of the visit is answered without
    being done.

    Args:
        opener: builds trials and opens visits of them.
        memory: has the device's slots.
        owner: hears what the device tells.
        computing: where it computes; who makes it starts it.
        double_buffering: whether shards are moved beside the computing.
    """

    def __init__(
        self,
        opener: VisitOpener,
        memory: DeviceMemory,
        owner: DeviceOwner,
        computing: Lane,
        double_buffering: bool = True,
    ) -> None:
        self._begun = -1  # the latest attempt whose trial's code ran
        self._opener = opener
        self._memory = memory
        self._owner = owner
        self._computed = -1  # the visit of the latest unit
        self._units = 0  # that were ordered and not answered
        self._visits: dict[int, DeviceVisit] = {}
        self._live: dict[int, Task] = {}  # of opened visits that neither failed nor closed
        self._slots: dict[Key, Segments] = {}
        self._unbound: dict[Key, tuple[Cursor | None, bool]] = {}  # what unloading gave
        self._grown: set[Key] = set()  # bound shards of which more has come
        self._given: _Given | None = None  # the unit under way
        self._inside: int | None = None  # the visit in whose call the computing thread is
        self._coming: Compute | None = None  # the next unit of that visit
        self._outside: list[Callable[[], object]] = []  # what is done after the call
        self._computing = computing
        self._promoting = self._demoting = computing
        if double_buffering:
            self._promoting, self._demoting = Lane("device-promotes"), Lane("device-demotes")

    def start(self) -> None:
        """Begin to move shards, if that is done beside the computing."""
        for lane in self._lanes - {self._computing}:
            lane.start(self._owner.end)

    def close(self) -> None:
        """End the threads after what they are doing."""
        for lane in self._lanes:
            lane.close()

    @property
    def _lanes(self) -> set[Lane]:
        return {self._computing, self._promoting, self._demoting}

    def give(self, order: Order) -> None:
        """Take an order; those of one thread are carried out one after the other."""
        match order:
            case Profile():
                self._put_outside(partial(self._profile, order))
            case Forget():
                self._put_outside(partial(self._opener.forget, order.trial))
            case Open():
                self._live[order.visit] = order.order.task
                self._put_outside(partial(self._open, order.order))
            case Close():
                self._put_outside(partial(self._close, order, self._live.pop(order.visit, None)))
            case Compute():
                self._units += 1
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

    def _put_outside(self, work: Callable[[], object]) -> None:
        """Let the computing thread do something, outside of every call of a visit."""

        def later() -> None:
            self._owner.flush()
            if self._inside is None:
                work()
            else:
                self._outside.append(work)

        self._computing.put(later)

    # ------------------------------------------------------------------ visits

    def _run_code_of(self, trial: int, attempt: int) -> None:
        """Note that code of a trial runs from now on, because an attempt asks for it."""
        if attempt != self._begun:
            self._begun = attempt
            self._owner.begin(attempt)
        attribute_to(trial)

    def _profile(self, order: Profile) -> None:
        trial = order.trial.trial
        self._run_code_of(trial, order.attempt)
        try:
            with shared_settings_kept():
                profile = self._opener.profile(order.trial)
        except BaseException as error:
            self._fail(None, trial, error)
        else:
            self._owner.answer(Profiled(trial, profile))

    def _open(self, order: VisitOrder) -> None:
        self._run_code_of(order.task.trial, order.task.attempt)
        try:
            with shared_settings_kept():
                self._visits[order.visit] = self._opener.open(order)
        except BaseException as error:
            self._fail(order.visit, order.task.trial, error)
        self._owner.answer(Opened(order.visit))

    def _close(self, order: Close, task: Task | None) -> None:
        """End a visit, whose failure was told before if it has no task any more."""
        visit = self._visits.pop(order.visit, None)
        if order.cancelled:
            if visit is not None:
                visit.cancel()
            attribute_to(None)
            return
        evaluation = None
        try:
            with shared_settings_kept():
                evaluation = None if visit is None else visit.close()
        except BaseException as error:
            if task is not None:
                self._fail(order.visit, task.trial, error)
        attribute_to(None)
        self._owner.answer(Closed(order.visit, evaluation))
        trim_now_and_then(within=0.0)

    def _fail(self, number: int | None, trial: int, error: BaseException) -> None:
        """Tell of an error that only the trial's own code can have caused.

        A device that is lost ends. That is no fault of the trial unless an assertion of its own
        failed there; what else it may be is found out when the visit begins again.
        """
        story = traceback_text(error)
        lost = self._memory.runtime.is_lost()
        if lost and not _is_assertion(error):
            _log.error("the device is lost, and starts again: %s", story)
            self._owner.end()
            return
        if is_error(error, StepDiffers):
            story = error_text(error)
        if number is not None:
            task = self._live.pop(number, None)
            self._put_outside(partial(self._close, Close(number, cancelled=True), task))
        lacking = memory_that_ran_out(error)
        self._put_outside(partial(self._collect, lacking is not None))
        self._owner.answer(Failed(number, trial, FailureKind.of(error), story, lacking))
        if lost:
            self._owner.end()

    def _collect(self, lacking: bool) -> None:
        """Let go of what a trial has left behind, and of all unused memory if there was too little.

        What is ordered after a failure finds it gone.
        """
        gc.collect()  # frames can refer to the trial's memory in a circle
        trim_heap(LEAST_TRIMMED)
        if lacking:
            self._memory.runtime.release()

    # ------------------------------------------------------------------ actions

    def _compute(self, unit: Compute) -> None:
        if unit.visit != self._computed:
            self._owner.flush()
        self._computed = unit.visit
        if self._inside is not None:
            assert unit.visit == self._inside, "a resident visit has the device to itself"
            self._coming = unit
            return
        self._given = _Given(unit)
        if (asked := self._live.get(unit.visit)) is not None:
            self._run_code_of(asked.trial, asked.attempt)
            self._do_tasks(unit, asked)
        self._answer_unit()
        outside, self._outside = self._outside, []
        for work in outside:
            work()
        trim_now_and_then()  # what tasks leave counts as the device's, too

    def _do_tasks(self, unit: Compute, asked: Task) -> None:
        """Do the tasks of a unit, until its visit is over."""
        try:
            with shared_settings_kept():
                while unit.visit in self._live and (task := self._next_task()) is not None:
                    self._perform(task)
        except Cancelled:
            pass  # its last words were heard before
        except BaseException as error:
            self._fail(unit.visit, asked.trial, error)
        finally:
            self._inside = None

    def _next_task(self) -> Action | None:
        """Return the next task of the unit under way."""
        return None if self._given is None else self._given.take()

    def _bind(self, task: Action) -> None:
        """Let the visit of a task have its shard, and copy the shard if that is wanted before."""
        assert self._given is not None
        key, visit, unit = (task.trial, task.shard), self._visits[task.trial], self._given.unit
        slots = self._slots[key]
        split = slots["trainable"].nbytes
        if key in self._unbound:
            cursor, _ = self._unbound.pop(key)
            visit.load(task.shard, slots, cursor)
        elif key in self._grown:
            self._grown.remove(key)
            visit.complete(task.shard, slots)
        if task.kind is ActionKind.U and (home := unit.slabs.get(home_of(task.shard))) is not None:
            slots = {**slots, "optimizer": memory_of(home[split:])}
            visit.complete(task.shard, slots)
        if unit.copied is not None and (copy := unit.slabs.get(copy_of(task.shard))) is not None:
            if (task.kind, task.microbatch) == (ActionKind.F, unit.copied[0]):
                self._memory.demote(slots, {"trainable": copy[:split]})
            elif (task.kind, task.microbatch) == (ActionKind.U, unit.copied[1]):
                self._memory.demote(slots, {"optimizer": copy[split:]})
                self._given.cursor = visit.cursor(task.shard)

    def _perform(self, task: Action) -> None:
        """Do a task; a resident visit goes on with those that come after it in a microbatch."""
        assert self._given is not None
        unit, visit = self._given.unit, self._visits[task.trial]
        first, last, unbound = task is unit.tasks[0], self._given.is_last, None
        try:
            if first and unit.record is not None:
                cast(MovingDeviceVisit, visit).take_up(
                    unit.tasks, unit.slabs["boundary"], unit.record
                )
            self._bind(task)
            if visit.resident:
                self._inside = task.trial
                ended, losses = visit.perform(task, self._then)
                self._inside = None
            else:
                ended, losses = visit.perform(task)
            digests, record = self._digests(ended), None
            if last and not visit.stays:
                unbound = visit.unload(task.shard)
            if last and unit.record is not None:
                record = cast(MovingDeviceVisit, visit).put_down()
        finally:  # whoever takes these slots next need not ask who uses them
            self._memory.finish()
        if unbound is not None:
            self._unbound[task.trial, task.shard] = unbound
        if self._given is not None:  # else the unit was answered, because the visit is over
            self._given.end(ended, losses, digests, record)

    def _then(self, ended: Action) -> Action:
        """End a task in the middle of a resident visit's call, and return the next one.

        Raises:
            Cancelled: there is none, because the visit or the device is over.
        """
        visit = ended.trial
        if self._given is not None:  # see `_perform`
            self._given.end(ended, {}, self._digests(ended))
        task = self._next_task() if visit in self._live else None
        if task is None:
            self._answer_unit()
            while self._coming is None and visit in self._live:
                if not self._computing.step():
                    self._computing.close()  # whoever runs the lane has to hear it, too
                    break
            coming, self._coming = self._coming, None
            if coming is not None:
                self._given = _Given(coming)  # it is answered, also if the visit is over
            if self._given is None or visit not in self._live:
                raise Cancelled(f"a visit was cancelled after {ended}")
            task = self._next_task()
            assert task is not None, "a unit has tasks"
        self._bind(task)
        return task

    def _digests(self, task: Action) -> TensorDigests | None:
        """Return the digests of a shard whose update, which was this task, is to be told."""
        watched = () if self._given is None else self._given.unit.watched
        if task.kind is not ActionKind.U or task.microbatch not in watched:
            return None
        return self._visits[task.trial].digests(task.shard)

    def _answer_unit(self) -> None:
        if self._given is not None:
            self._units -= 1
            answer = self._owner.answer_soon if self._units > 0 else self._owner.answer
            answer(self._given.answer())
        self._given = None

    def _move(self, order: Move) -> None:
        """Move a shard; one that a visit stays bound to is let go of by the computing thread."""
        action, begun = order.action, time.perf_counter()
        key, done = (action.trial, action.shard), Done(action)
        asked, slabs = self._live.get(action.trial), order.parted()
        try:
            if asked is None:
                self._give_up(key)
            elif action.kind is ActionKind.LOAD:
                slots = self._memory.promote(slabs, order.gradients)
                if self._promoting is self._computing and action.trial in self._visits:
                    slots = self._visits[action.trial].moved(slots)
                if (before := self._slots.get(key)) is None:
                    self._unbound[key] = order.cursor, False
                elif key not in self._unbound:
                    self._grown.add(key)
                self._slots[key] = {**(before or {}), **slots}
            else:
                if key not in self._unbound:
                    unbound = self._visits[action.trial].unload(action.shard)
                    self._memory.finish()
                    self._unbound[key] = unbound
                    if action.kind is ActionKind.SPILL:
                        self._demoting.put(partial(self._move, order))
                        return
                cursor, has_gradients = self._unbound[key]
                if action.kind is ActionKind.SPILL:
                    self._memory.demote(self._slots[key], slabs)
                self._give_up(key)
                done = replace(done, cursor=cursor, has_gradients=has_gradients)
        except BaseException as error:
            if asked is None:
                raise
            self._fail(action.trial, asked.trial, error)
        if action.kind is not ActionKind.DROP:
            moved = sum(slab.nbytes for slab in slabs.values())
            self._owner.answer(replace(done, seconds=time.perf_counter() - begun, nbytes=moved))

    def _lane_of(self, move: Action) -> Lane:
        """Return the lane of a move; DROP gives a place up that the LOAD after it may take."""
        return self._demoting if move.kind is ActionKind.SPILL else self._promoting

    def _give_up(self, key: Key) -> None:
        self._unbound.pop(key, None)
        self._grown.discard(key)
        if (slots := self._slots.pop(key, None)) is not None:
            self._memory.give_up(slots)


def _is_assertion(error: BaseException) -> bool:
    return attribute_of(error, "error_code") == CUDA_ASSERT or _ASSERTION in error_text(error)


class DeviceOwner(Protocol):
    """Made a device, in whose process it is."""

    def answer(self, answer: Answer) -> None:
        """Take what is to be told, from any thread."""
        ...

    def answer_soon(self, answer: Answer) -> None:
        """Take what may be told with what comes in a moment."""
        ...

    def flush(self) -> None:
        """Tell now what may wait: what is told last says whose code runs, if the process ends."""
        ...

    def begin(self, attempt: int) -> None:
        """Take the attempt whose trial's code runs next, which is another one than before."""
        ...

    def end(self) -> None:
        """End the process, whose device is lost, or one of whose threads ended by an error."""
        ...


class DeviceVisit(Protocol):
    """One sub-epoch or evaluation on a device; the device's computing thread uses it.

    Attributes:
        stays: whether shards are bound to their slots for longer than a unit.
        resident: whether they stay to its end, and one call makes all tasks of a microbatch.
    """

    stays: bool
    resident: bool

    def moved(self, slots: Segments) -> Segments:
        """Return slots with the same content where the visit wants them, before it takes them.

        A device that moves shards beside its computing has the only place for them, and asks not.
        """
        ...

    def load(self, shard: int, slots: Segments, cursor: Mapping[str, Any] | None) -> None:
        """Take a shard, which lies in the slots; "gradients" is one of them if it has some."""
        ...

    def complete(self, shard: int, slots: Segments) -> None:
        """Take what has come of a shard that is bound: optimizer state, or memory for gradients."""
        ...

    def unload(self, shard: int) -> tuple[Mapping[str, Any] | None, bool]:
        """Let go of a shard; return its cursor, and whether nobody has used its gradients up."""
        ...

    def perform(
        self, task: Action, then: Callable[[Action], Action] | None = None
    ) -> tuple[Action, Losses]:
        """Do F, B or U of a shard; return the task that was done last, and losses that it gave.

        Args:
            then: is told of a task, and returns the next one; a resident visit may do so and go on.
        """
        ...

    def cursor(self, shard: int) -> Mapping[str, Any] | None:
        """Return the cursor that a loaded shard had before the update that comes."""
        ...

    def digests(self, shard: int) -> TensorDigests:
        """Return the digests of a loaded shard's tensors."""
        ...

    def close(self) -> Evaluation | None:
        """End the visit after its last task, or say why its results can't be used."""
        ...

    def cancel(self) -> None:
        """End the visit where it stands."""
        ...


class MovingDeviceVisit(DeviceVisit, Protocol):
    """A visit, of which the device does some units and other devices do others."""

    def take_up(self, tasks: Sequence[Action], slab: Bytes, record: PassRecord) -> None:
        """Begin a unit, where the record says what the slab has for it."""
        ...

    def put_down(self) -> PassRecord:
        """End a unit, whose shard is unloaded; return what the slab has after it."""
        ...


class VisitOpener(Protocol):
    """Builds trials in the process of a device."""

    def profile(self, trial: TrialSpec) -> TrialProfile:
        """Build a trial, unless it was built before, and describe it."""
        ...

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        ...

    def open(self, order: VisitOrder) -> DeviceVisit:
        """Return a visit of a trial."""
        ...
