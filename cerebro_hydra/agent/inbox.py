"""The work of a worker's queues: put in by any thread, done by one, each piece after the other."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

TICK_SECONDS = 0.25


class Inbox:
    """Takes pieces of work from any thread, and gives them to the one that iterates over it.

    Args:
        tick: comes among them now and then, also while nothing else does.
    """

    def __init__(self, tick: Callable[[], object]) -> None:
        self._tick = tick
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._gathering = threading.Lock()
        self._last: tuple[object, list[Any]] | None = None  # what was put last, if it gathers

    def put(self, work: Callable[[], object]) -> None:
        """Take a piece of work."""
        with self._gathering:
            self._last = None
            self._work.put(work)

    def through(self, work: Callable[..., object]) -> Callable[..., None]:
        """Return what puts in the work with its arguments; called from any thread."""
        return lambda *args: self.put(partial(work, *args))

    def gathered(self, work: Callable[[list[Any]], object]) -> Callable[..., None]:
        """Return what puts in the work with the arguments of all calls, each a tuple.

        The work is done once for all calls that come before it is begun, unless something else was
        put in between. They come from any thread.
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

    def close(self) -> None:
        """End the iteration after what was put in before."""
        with self._gathering:
            self._last = None
            self._work.put(None)

    def __iter__(self) -> Iterator[Callable[[], object]]:
        """Yield what is to be done next, for as long as it is not closed."""
        next_tick = 0.0
        while True:
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                yield self._tick
            try:
                work = self._work.get(timeout=TICK_SECONDS)
            except queue.Empty:
                continue
            if work is None:
                return
            yield work
