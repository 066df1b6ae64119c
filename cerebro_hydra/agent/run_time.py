"""Times one run in the queues of a worker: a wait for shards, devices or neighbours is no time."""

from __future__ import annotations

import time
from collections.abc import Callable

from cerebro_hydra.agent.task_watch import Task, TaskWatch

MakeWatch = Callable[[Callable[[Task, str], object], Callable[[], float]], TaskWatch]
"""Makes a watch, given what is told of an overdue task, and a clock."""


class RunTime:
    """Counts the seconds that devices compute for a run, and watches its batches by that clock."""

    def __init__(
        self, task: Task, make_watch: MakeWatch, on_overdue: Callable[[Task, str], object]
    ) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._building = False
        self._watch = make_watch(on_overdue, self._clock)
        self._watch.begin(task)
        self._watch.batch()

    def _clock(self) -> float:
        if self._since is None or self._building:
            return self._seconds
        return self._seconds + time.monotonic() - self._since

    @property
    def seconds(self) -> float:
        """Return how long devices have computed for the run."""
        return self._clock()

    def build(self) -> None:
        """Note that a device builds the trial before it computes."""
        self._building = True

    def built(self) -> None:
        """Note that it has done so."""
        self._building = False
        if self._since is not None:
            self._since = time.monotonic()

    def start(self) -> None:
        """Note that a device computes for the run."""
        self._since = time.monotonic()

    def stop(self, ends_batch: bool) -> None:
        """Note that it has ended a task, and with it maybe a batch."""
        self._seconds, self._since = self._clock(), None
        if ends_batch:
            self._watch.batch()

    def check(self) -> None:
        """Tell if the run is slow or overdue."""
        self._watch.check()
