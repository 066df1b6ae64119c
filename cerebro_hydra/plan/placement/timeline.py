"""A timeline of tasks on lanes, which is repaired where a change touches it.

It is the simulator of FlexFlow (Jia et al., "Beyond Data and Model Parallelism for Deep Neural
Networks", MLSys 2019, section 5): a task is ready when those before it have ended, and a lane does
its tasks in the order in which they get ready. `simulated` makes the whole timeline (their
algorithm 1). `TaskTimeline.change` makes what the whole one would be after some tasks came, went or
became other ones, and looks only at tasks whose times may differ (their section 5.3). In their
words only what has changed goes on to its followers; a task that is new on a lane must, too, even
where its own times are the old ones, because what follows it there began without it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class TimedTask:
    """Describes a task.

    Args:
        lane: does one task at a time.
        seconds: that it takes, more than none, so that tasks have one order in time.
        after: the tasks that end before it begins.

    Raises:
        ValueError: it takes no time.
    """

    lane: int
    seconds: float
    after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a task that takes no time."""
        if not self.seconds > 0:
            raise ValueError(f"a task takes {self.seconds} seconds; give it more than none")


class Times(NamedTuple):
    """Tells when a task is ready, when it begins, and when it ends."""

    ready: float
    begin: float
    end: float


Tasks = Mapping[int, TimedTask]


def simulated(tasks: Tasks) -> dict[int, Times]:
    """Return the times of all tasks, by their numbers; of those ready at once, the lowest is first.

    Raises:
        ValueError: tasks wait for one another in a circle, or for one that is not there.
    """
    behind: defaultdict[int, list[int]] = defaultdict(list)
    for number, task in tasks.items():
        for each in task.after:
            behind[each].append(number)
    waits = {number: len(task.after) for number, task in tasks.items()}
    ready = dict.fromkeys(tasks, 0.0)
    heap = [(0.0, number) for number, count in waits.items() if not count]
    heapq.heapify(heap)
    free: defaultdict[int, float] = defaultdict(float)
    times: dict[int, Times] = {}
    while heap:
        moment, number = heapq.heappop(heap)
        task = tasks[number]
        begin = max(moment, free[task.lane])
        end = free[task.lane] = begin + task.seconds
        times[number] = Times(moment, begin, end)
        for each in behind[number]:
            ready[each] = max(ready[each], end)
            waits[each] -= 1
            if not waits[each]:
                heapq.heappush(heap, (ready[each], each))
    if len(times) < len(tasks):
        raise ValueError(f"tasks {sorted(tasks.keys() - times.keys())} wait for ever")
    return times


class TaskTimeline:
    """Holds tasks and their times, and changes them; `undo` takes the last change back.

    Attributes:
        looked_at: how many tasks changes have looked at so far.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = dict(tasks)
        self.times = simulated(tasks)
        self.looked_at = 0
        self._behind: defaultdict[int, set[int]] = defaultdict(set)
        self._rows: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        for number, task in tasks.items():
            for each in task.after:
                self._behind[each].add(number)
            self._rows[task.lane].append((self.times[number].ready, number))
        for row in self._rows.values():
            row.sort()
        self._old_tasks: dict[int, TimedTask | None] = {}
        self._old_times: dict[int, Times | None] = {}

    @property
    def makespan(self) -> float:
        """Return when the last task ends."""
        return max((self.times[row[-1][1]].end for row in self._rows.values() if row), default=0.0)

    def change(self, changed: Mapping[int, TimedTask | None]) -> None:
        """Set tasks anew, or take them away (None), and find the times that follow.

        What goes must have no task behind it that stays.
        """
        self._old_tasks, self._old_times = {}, {}
        dirty: list[tuple[float, int]] = []
        for number, task in changed.items():
            if task == self.tasks.get(number):
                continue
            if (following := self._take_away(number)) is not None:
                dirty.append(following)
            if task is not None:
                self._set(number, task)
                dirty.append((0.0, number))
        self._repair(dirty)

    def undo(self) -> None:
        """Set tasks and times as they were before the last change."""
        for number, task in self._old_tasks.items():
            self._take_away(number, keep=False)
            if task is not None:
                self._set(number, task, keep=False)
        for number, times in self._old_times.items():
            self._place(number, times)
        self._old_tasks, self._old_times = {}, {}

    def _take_away(self, number: int, keep: bool = True) -> tuple[float, int] | None:
        """Take a task away; return what followed it on its lane."""
        task = self.tasks.pop(number, None)
        if keep:
            self._old_tasks.setdefault(number, task)
            self._old_times.setdefault(number, self.times.get(number))
        if task is None:
            return None
        for each in task.after:
            self._behind[each].discard(number)
        times = self.times.pop(number, None)
        if times is None:
            return None
        row = self._rows[task.lane]
        at = bisect_left(row, (times.ready, number))
        del row[at]
        return row[at] if at < len(row) else None

    def _set(self, number: int, task: TimedTask, keep: bool = True) -> None:
        self.tasks[number] = task
        for each in task.after:
            self._behind[each].add(number)

    def _place(self, number: int, times: Times | None) -> None:
        """Give a task other times, or none."""
        before = self.times.pop(number, None)
        if before is not None:
            row = self._rows[self.tasks[number].lane]
            del row[bisect_left(row, (before.ready, number))]
        if times is not None:
            insort(self._rows[self.tasks[number].lane], (times.ready, number))
            self.times[number] = times

    def _repair(self, dirty: list[tuple[float, int]]) -> None:
        """Find the times of tasks that may differ, those that may be ready first before others."""
        times, tasks = self.times, self.tasks
        heapq.heapify(dirty)
        waiting = {number for _, number in dirty}
        while dirty:
            number = heapq.heappop(dirty)[1]
            if number not in waiting:
                continue
            waiting.discard(number)
            task = tasks.get(number)
            if task is None or any(each not in times for each in task.after):
                continue  # one before it comes later, and after that it does again
            self.looked_at += 1
            was = times.get(number)
            ready = max((times[each].end for each in task.after), default=0.0)
            row = self._rows[task.lane]
            if was is None or was.ready != ready:
                if was is not None:
                    at = bisect_left(row, (was.ready, number))
                    del row[at]
                    if at < len(row) and row[at][1] not in waiting:
                        waiting.add(row[at][1])
                        heapq.heappush(dirty, row[at])
                at = bisect_left(row, (ready, number))
                row.insert(at, (ready, number))
            else:
                at = bisect_left(row, (ready, number))
            begin = max(ready, times[row[at - 1][1]].end) if at else ready
            now = Times(ready, begin, begin + task.seconds)
            if now == was:
                continue
            self._old_times.setdefault(number, was)
            times[number] = now
            follows: Sequence[int] = (*self._behind[number], *(n for _, n in row[at + 1 : at + 2]))
            for each in follows:
                if each not in waiting:
                    waiting.add(each)
                    heapq.heappush(dirty, (times[each].ready if each in times else now.end, each))
