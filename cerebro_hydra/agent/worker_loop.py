"""The one thread that hands events to the queues of a worker and carries out what they decide."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

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
        carry_out: begins what they decide.
        broken: takes an error that ends the loop.
        tick: is called now and then by the loop.
    """

    def __init__(
        self,
        state: WorkerState,
        lock: AbstractContextManager[object],
        log: DeviceLog,
        carry_out: Callable[[Answer], object],
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
        self._gathering = threading.Lock()
        self._last: tuple[object, list[Any]] | None = None  # what was put last, if it gathers
        self._thread = threading.Thread(target=self._run, name="shard-queues", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Let the loop do something; called from any thread."""
        with self._gathering:
            self._last = None
            self._work.put(work)

    def through(self, work: Callable[..., object]) -> Callable[..., None]:
        """Return what lets the loop do the work with its arguments; called from any thread."""
        return lambda *args: self.put(partial(work, *args))

    def gathered(self, work: Callable[[list[Any]], object]) -> Callable[..., None]:
        """Return what lets the loop do the work with the arguments of all calls, each a tuple.

        The work is done once for all calls that come before it is begun, unless the loop was given
        something else in between. They come from any thread.
        """

        def gather(*args: Any) -> None:
            with self._gathering:
                if self._last is None or self._last[0] is not work:
                    self._last = work, []
                    self._work.put(partial(self._do_gathered, work, self._last[1]))
                self._last[1].append(args)

        return gather

    def _do_gathered(self, work: Callable[[list[Any]], object], calls: list[Any]) -> None:
        with self._gathering:
            if self._last is not None and self._last[1] is calls:
                self._last = None
        work(calls)

    def tell(self, *events: WorkerEvent) -> None:
        """Tell the queues of something; called by what the loop does."""
        self._events += events

    def stop(self) -> None:
        """End the loop after what it is doing."""
        with self._gathering:
            self._last = None
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
                    for decision in decisions:
                        self._carry_out(decision)
        except Exception as error:
            self._broken(error)


def _nothing() -> None:
    """Is done when nothing has happened for a while."""


Unit = tuple[Action, ...]


class UnitGate:
    """Holds units back while other threads do what must be done before; the loop uses it.

    It may be shut for a visit, or for all of them (None), and more than once. A unit that is held
    back holds back those that come after it on its device.
    """

    def __init__(self) -> None:
        self._shut = Counter[int | None]()
        self._held: list[Unit] = []

    def holds(self, unit: Unit) -> bool:
        """Return whether a unit may not begin yet; it is kept then."""
        first = unit[0]
        is_behind = any(each[0].device == first.device for each in self._held)
        if holds := bool(is_behind or self._shut[None] or self._shut[first.trial]):
            self._held.append(unit)
        return holds

    def shut(self, visit: int | None) -> None:
        """Hold units back until it is opened as often."""
        self._shut[visit] += 1

    def open(self, visit: int | None) -> list[Unit]:
        """Return the units that may begin now, in their order."""
        self._shut -= Counter([visit])  # a visit that is not shut any more has no entry
        return self._free()

    def remove(self, visit: int) -> list[Unit]:
        """Hold nothing back for a visit any more; return the units that may begin now."""
        del self._shut[visit]
        return self._free()

    def lose(self, device: int) -> None:
        """Forget the units of a device that has died."""
        self._held = [unit for unit in self._held if unit[0].device != device]

    def _free(self) -> list[Unit]:
        held, self._held = self._held, []
        return [unit for unit in held if not self.holds(unit)]
