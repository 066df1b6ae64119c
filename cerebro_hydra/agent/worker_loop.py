"""The one thread that hands events to the queues of a worker and carries out what they decide."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.queues.events import Answer, WorkerEvent
from cerebro_hydra.plan.queues.log import DeviceLog
from cerebro_hydra.plan.queues.worker import WorkerState

TICK_SECONDS = 0.25


class WorkerLoop:
    """Does pieces of work one after the other; events that they tell of go to the queues at once.

    Args:
        state: the queues.
        lock: of the queues, which other threads ask what leaves DRAM.
        log: is told what happens, and looks at the queues after each decision.
        carry_out: begins what they decide, with the tasks of a unit as a list.
        broken: takes an error that ends the loop.
        tick: is called now and then by the loop.
    """

    def __init__(
        self,
        state: WorkerState,
        lock: AbstractContextManager[object],
        log: DeviceLog,
        carry_out: Callable[[Answer | list[Action]], object],
        broken: Callable[[Exception], object],
        tick: Callable[[], object],
    ) -> None:
        self._state, self._lock, self._log = state, lock, log
        self._carry_out = carry_out
        self._broken = broken
        self._tick = tick
        self._next_tick = 0.0
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._events: list[WorkerEvent] = []
        self._thread = threading.Thread(target=self._run, name="shard-queues", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Let the loop do something; called from any thread."""
        self._work.put(work)

    def through(self, work: Callable[..., object]) -> Callable[..., None]:
        """Return what lets the loop do the work with its arguments; called from any thread."""
        return lambda *args: self.put(partial(work, *args))

    def tell(self, *events: WorkerEvent) -> None:
        """Tell the queues of something; called by what the loop does."""
        self._events += events

    def stop(self) -> None:
        """End the loop after what it is doing."""
        self._work.put(None)

    def join(self) -> None:
        """Wait for the end of the loop."""
        self._thread.join()

    def _next(self) -> Callable[[], object] | None:
        try:
            work = self._work.get(timeout=TICK_SECONDS)
        except queue.Empty:
            work = _nothing
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + TICK_SECONDS
            self._tick()
        return work

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                work()
                while self._events:
                    events, self._events = self._events, []
                    self._log.hear(time.monotonic(), events)
                    with self._lock:
                        decisions = self._state.handle(events)
                    self._log.look()
                    for decision in with_units(decisions):
                        self._carry_out(decision)
        except Exception as error:
            self._broken(error)


def _nothing() -> None:
    """Is done when nothing has happened for a while."""


class UnitGate:
    """Holds units back while other threads do what must be done before; the loop uses it.

    It may be shut for a visit, or for all of them (None), and more than once.
    """

    def __init__(self) -> None:
        self._shut = Counter[int | None]()
        self._held: list[list[Action]] = []

    def holds(self, unit: list[Action]) -> bool:
        """Return whether a unit may not begin yet; it is kept then."""
        if is_shut := bool(self._shut[None] or self._shut[unit[0].trial]):
            self._held.append(unit)
        return is_shut

    def shut(self, visit: int | None) -> None:
        """Hold units back until it is opened as often."""
        self._shut[visit] += 1

    def open(self, visit: int | None) -> list[list[Action]]:
        """Return the units that may begin now, in their order."""
        self._shut -= Counter([visit])  # a visit that is not shut any more has no entry
        held, self._held = self._held, []
        return [unit for unit in held if not self.holds(unit)]

    def take(self, visit: int) -> list[Action]:
        """Return the tasks that are held back of a visit which will not do them."""
        tasks = [task for unit in self._held for task in unit if task.trial == visit]
        self._held = [unit for unit in self._held if unit[0].trial != visit]
        return tasks

    def lose(self, device: int) -> None:
        """Forget the units of a device that has died."""
        self._held = [unit for unit in self._held if unit[0].device != device]


def with_units(decisions: Sequence[Answer]) -> Iterator[Answer | list[Action]]:
    """Yield the decisions, with the tasks that a device is to do one after the other as a list."""
    unit: list[Action] = []
    for decision in decisions:
        if unit and not _continues(unit, decision):
            yield unit
            unit = []
        if isinstance(decision, Action) and decision.kind.computes:
            unit.append(decision)
        else:
            yield decision
    if unit:
        yield unit


def _continues(unit: list[Action], decision: Answer) -> bool:
    if not isinstance(decision, Action) or not decision.kind.computes:
        return False
    return (decision.trial, decision.device) == (unit[0].trial, unit[0].device)
