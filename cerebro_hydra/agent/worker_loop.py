"""The one thread that hands events to the queues of a worker and carries out what they decide."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from cerebro_hydra.agent.units import with_units
from cerebro_hydra.plan.actions import Action
from cerebro_hydra.plan.worker_events import Answer, WorkerEvent
from cerebro_hydra.plan.worker_state import WorkerState


class WorkerLoop:
    """Does pieces of work one after the other; events that they tell of go to the queues at once.

    Args:
        state: the queues.
        carry_out: begins what they decide, with the tasks of a unit as a list.
        broken: takes an error that ends the loop.
    """

    def __init__(
        self,
        state: WorkerState,
        carry_out: Callable[[Answer | list[Action]], object],
        broken: Callable[[Exception], object],
    ) -> None:
        self._state = state
        self._carry_out = carry_out
        self._broken = broken
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._events: list[WorkerEvent] = []
        self._thread = threading.Thread(target=self._run, name="shard-queues", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Let the loop do something; called from any thread."""
        self._work.put(work)

    def tell(self, *events: WorkerEvent) -> None:
        """Tell the queues of something; called by what the loop does."""
        self._events += events

    def stop(self) -> None:
        """End the loop after what it is doing."""
        self._work.put(None)

    def join(self) -> None:
        """Wait for the end of the loop."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                work()
                while self._events:
                    events, self._events = self._events, []
                    for decision in with_units(self._state.handle(events)):
                        self._carry_out(decision)
        except Exception as error:
            self._broken(error)
