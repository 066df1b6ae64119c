"""Times the tasks of a worker, and tells how far they are.

It says when a task exceeds a limit or seems to hang. A wait for shards, devices or neighbours is no
time of a visit.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from statistics import median
from typing import Any

from cerebro_hydra.plan.messages.instructions import Evaluate, StartSubEpoch

SLOW_FACTOR = 20
"""Times the median of its trial's batches: a batch that takes longer is told of."""

LEAST_SLOW_SECONDS = 5.0
"""Seconds that a batch may take in any case before it is told of."""

FIRST_BATCH_SECONDS = 60.0
"""Seconds after which a batch is told of while its trial has no batch to compare with."""

_REMEMBERED = 200  # batches per trial that the median is taken of

Task = StartSubEpoch | Evaluate


@dataclass(slots=True)
class _Timed:
    """Records the task that is timed; its moments are those of its own clock."""

    task: Task
    begun: float | None = None  # with its first batch, when its model is built
    batch_begun: float = 0.0
    batches: int = 1  # that are timed together, because a device does them without a word
    thread: int | None = None  # that computes; None if it is none of this process
    told: bool = False


class BatchSeconds:
    """Remembers how long the batches of trials took; one thread uses it."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, type], deque[float]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )

    def note(self, task: Task, seconds: float) -> None:
        """Note how long a batch took."""
        self._seconds[task.trial, type(task)].append(seconds)

    def median(self, task: Task) -> float | None:
        """Return the median of the trial's latest batches of this kind, if there were any."""
        known = self._seconds.get((task.trial, type(task)))
        return median(known) if known else None

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        for kind in (StartSubEpoch, Evaluate):
            self._seconds.pop((trial, kind), None)


@dataclass(frozen=True)
class TimeLimits:
    """Says how long the tasks of a worker may take.

    Args:
        batch_seconds: how long one batch may take, or None.
        sub_epoch_seconds: how long a sub-epoch or an evaluation of a partition may take from its
            first batch on, or None.
        on_slow: told once per task, with the seconds of a batch so far and the median, if any.
        waited: the seconds that a task has waited for others while it computed.
    """

    batch_seconds: float | None
    sub_epoch_seconds: float | None
    on_slow: Callable[[Task, float, float | None], object]
    waited: Callable[[Task], float] = lambda task: 0.0


class TaskWatch:
    """Watches one task; it sees nothing while Python is locked. One thread uses it.

    Args:
        known: remembers the batches of all tasks.
        on_overdue: told the task that exceeds a limit, and why, in words.
        clock: seconds from any start, without waits.
    """

    def __init__(
        self,
        limits: TimeLimits,
        known: BatchSeconds,
        on_overdue: Callable[[Task, str], object],
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._known = known
        self._on_overdue = on_overdue
        self._clock = clock
        self._timed: _Timed | None = None

    def _now(self, timed: _Timed) -> float:
        return self._clock() - self._limits.waited(timed.task)

    def begin(self, task: Task) -> None:
        """Time a task, until another one begins."""
        self._timed = _Timed(task)

    def run_on(self, thread: int | None, batches: int) -> None:
        """Note how many batches are timed together, and which thread of this process computes."""
        if self._timed is not None:
            self._timed.thread, self._timed.batches = thread, max(1, batches)

    def batch(self) -> None:
        """Note that the next batch begins, after those that were timed together."""
        timed = self._timed
        if timed is None:
            return
        now = self._now(timed)
        if timed.begun is None:
            timed.begun = now
        else:
            self._known.note(timed.task, (now - timed.batch_begun) / timed.batches)
        timed.batch_begun = now

    def begin_batch_anew(self) -> None:
        """Note that the batch under way is done again."""
        if self._timed is not None:
            self._timed.batch_begun = self._now(self._timed)

    def check(self, patience: float = 1, silence: float = 0.0) -> None:
        """Tell of what is slow or overdue now.

        Args:
            patience: so many times the limits are allowed.
            silence: the seconds before now that don't count.
        """
        timed = self._timed
        if timed is None or timed.begun is None:
            return
        now, usual = self._now(timed) - silence, self._known.median(timed.task)
        # One of them may have taken so long, if the others took what batches usually take.
        passed, task = now - timed.batch_begun, now - timed.begun
        others = (timed.batches - 1) * (passed / timed.batches if usual is None else usual)
        batch, times = passed - others, "" if patience == 1 else f"{patience:g} times "
        of_batch, of_task = self._limits.batch_seconds, self._limits.sub_epoch_seconds
        if of_batch is not None and batch > patience * of_batch:
            why = f"a batch took {batch:.1f} s, longer than {times}batch_seconds={of_batch:g}"
        elif of_task is not None and task > patience * of_task:
            why = f"it took {task:.1f} s, longer than {times}sub_epoch_seconds={of_task:g}"
        else:
            self._tell_slow(timed, batch, usual)
            return
        self._timed = None
        self._on_overdue(timed.task, f"{why}, {_where(timed)}")

    def _tell_slow(self, timed: _Timed, seconds: float, usual: float | None) -> None:
        if timed.told or seconds < LEAST_SLOW_SECONDS:
            return
        if seconds >= (FIRST_BATCH_SECONDS if usual is None else SLOW_FACTOR * usual):
            timed.told = True
            self._limits.on_slow(timed.task, seconds, usual)


def _where(timed: _Timed) -> str:
    """Return which task it is, and the stack of its thread if that is one of this process."""
    where = f"in {described(timed.task)}; allow more, or look for what hangs"
    if timed.thread is None:
        return where
    frame = sys._current_frames().get(timed.thread)
    return f"{where}:\n" + "".join(traceback.format_stack(frame))


def described(task: Task) -> str:
    """Return what a task does, and where."""
    doing = "training" if isinstance(task, StartSubEpoch) else "evaluation"
    return f"{doing} of epoch {task.epoch + 1} on partition {task.partition} (worker {task.worker})"


def located(task: StartSubEpoch, step: int) -> str:
    """Return which step of a sub-epoch it is, and where it was trained."""
    where = f"in epoch {task.epoch + 1} on partition {task.partition} (worker {task.worker})"
    return f"at step {step}, {where}"


class VisitTime:
    """Counts the seconds that devices compute for a visit, and watches its batches by a clock.

    The clock stands still while no device computes for the visit, or each builds the trial first. A
    device is named by whatever it is.

    Args:
        known: remembers the batches of all tasks.
        on_overdue: told why a limit is exceeded, and which device has computed longest by then, if
            one does; again if another one computes as long after that.
    """

    def __init__(
        self,
        task: Task,
        limits: TimeLimits,
        known: BatchSeconds,
        on_overdue: Callable[[str, Any], object],
    ) -> None:
        self._begun: dict[Any, float] = {}  # the moment since which each device computes
        self._building: set[Any] = set()
        self._seconds = 0.0
        self._passed, self._since = 0.0, math.inf  # of the clock, until and from this moment on
        self._on_overdue = on_overdue
        self._task = task
        self._watch = TaskWatch(limits, known, self._overdue, self._clock)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Note that the visit has all of its time again."""
        self._watch.begin(self._task)
        self._watch.batch()

    def _overdue(self, task: Task, why: str) -> None:
        self.begin_anew()
        self._on_overdue(why, min(self.computing, key=self._begun.__getitem__, default=None))

    def _clock(self) -> float:
        return self._passed + max(0.0, time.monotonic() - self._since)

    @property
    def seconds(self) -> float:
        """Return how long devices have computed for the visit, those at the same time each."""
        now = time.monotonic()
        return self._seconds + sum(now - self._begun[device] for device in self.computing)

    @property
    def computing(self) -> Set[Any]:
        """Return the devices that compute for the visit now."""
        return self._begun.keys() - self._building

    def build(self, device: Any) -> None:
        """Note that a device builds the trial before it computes."""
        self._building.add(device)

    def built(self, device: Any) -> None:
        """Note that it has done so."""
        self._building.discard(device)
        now = time.monotonic()
        if device in self._begun:
            self._begun[device] = now
        self._turn(now)

    def start(self, device: Any, thread: int | None, batches: int, now: float) -> None:
        """Note that a device does a unit from this moment on, which ends so many batches.

        Args:
            thread: that computes, if it is one of this process.
        """
        self._watch.run_on(thread, batches)
        self._begun[device] = now
        self._turn(now)

    def stop(self, device: Any, ends_batch: bool, now: float) -> None:
        """Note that it has done the unit by this moment, and with it maybe batches."""
        self.lose(device, now)
        if ends_batch:
            self._watch.batch()

    def lose(self, device: Any, now: float) -> None:
        """Note that a device does the unit no longer from this moment on."""
        begun = self._begun.pop(device, None)
        if begun is not None and device not in self._building:
            self._seconds += max(0.0, now - begun)
        self._building.discard(device)
        self._turn(now)

    def died(self, device: Any) -> None:
        """Note that a device has died: the time of its unit, which is done again, is given back."""
        now = time.monotonic()
        computing, begun = device in self.computing, self._begun.get(device, 0.0)
        self.lose(device, now)
        if computing:
            self._passed -= now - begun
            self._watch.begin_batch_anew()

    def _turn(self, now: float) -> None:
        """Let the clock go on, or stand still; what is told late may go back by a moment."""
        since = now if math.isinf(self._since) else self._since
        self._passed += max(0.0, now - since)
        self._since = max(now, since) if self.computing else math.inf

    def check(self, patience: float = 1, silence: float = 0.0) -> None:
        """Tell if the visit is slow or overdue, with so many times the limits.

        Args:
            silence: for how long a device that computes may be dead: it shows no life. What became
                of it is known soon, and it is not slow if it is dead.
        """
        self._watch.check(patience, silence)


PROGRESS_SECONDS = 0.5


class Progress:
    """Sends messages of progress for the coordinator; one thread uses it.

    Args:
        send: takes a message.
    """

    def __init__(self, send: Callable[[dict[str, Any]], object]) -> None:
        self._send = send
        self._next = time.monotonic() + PROGRESS_SECONDS

    def is_due(self) -> bool:
        """Return whether a while has gone by since it was due before."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + PROGRESS_SECONDS
        return True

    def send(self, progress: dict[str, Any]) -> None:
        """Send how far a sub-epoch is."""
        self._send({"progress": progress})
