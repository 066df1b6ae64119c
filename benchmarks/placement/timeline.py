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
from collections import defaultdict
from collections.abc import Collection, Mapping
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
        looked_at: how many tasks changes have simulated so far.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.tasks: dict[int, TimedTask] = {}
        self.times: dict[int, Times] = {}
        self.looked_at = 0
        self._on: defaultdict[int, set[int]] = defaultdict(set)  # tasks by lane
        self._ends: dict[int, float] = {}  # of lanes
        self._behind: defaultdict[int, set[int]] = defaultdict(set)
        self._before: tuple[dict[int, TimedTask | None], dict[int, Times]] = {}, {}
        self._set(tasks)
        self._simulate({task.lane for task in tasks.values()})
        self.looked_at = 0

    @property
    def makespan(self) -> float:
        """Return when the last task ends."""
        return max(self._ends.values(), default=0.0)

    def change(self, changed: Mapping[int, TimedTask | None]) -> None:
        """Set tasks anew, or take them away (None), and find the times that follow.

        What goes must have no task behind it that stays.
        """
        changed = {n: task for n, task in changed.items() if task != self.tasks.get(n)}
        before = {number: self.tasks.get(number) for number in changed}
        lanes = self._set(changed)
        old = self._simulate(lanes)
        gone = {n: self.times.pop(n) for n in before if n not in self.tasks and n in self.times}
        self._before = before, old | gone

    def undo(self) -> None:
        """Set tasks and times as they were before the last change."""
        tasks, times = self._before
        lanes = self._set(tasks)
        self.times |= times
        for number in tasks.keys() - self.tasks.keys():
            self.times.pop(number, None)
        self._end({self.tasks[number].lane for number in times} | lanes)
        self._before = {}, {}

    def _set(self, changed: Mapping[int, TimedTask | None]) -> set[int]:
        """Set tasks anew, or take them away; return the lanes that had them or have them now."""
        lanes = set()
        for number in changed:
            if (task := self.tasks.get(number)) is not None:
                for each in task.after:
                    self._behind[each].discard(number)
                lanes.add(task.lane)
        for number, task in changed.items():
            if number in self.tasks:
                self._on[self.tasks.pop(number).lane].discard(number)
            if task is not None:
                self.tasks[number] = task
                self._on[task.lane].add(number)
                lanes.add(task.lane)
        for number, task in changed.items():
            for each in task.after if task is not None else ():
                if each not in self.tasks:
                    raise ValueError(f"task {number} waits for task {each}, which is not there")
                self._behind[each].add(number)
        return lanes

    def _simulate(self, lanes: Collection[int]) -> dict[int, Times]:
        """Simulate these lanes, and all that tasks connect with them; return the old times."""
        found, waiting = set(lanes), [*lanes]
        while waiting:
            here = self._on[waiting.pop()]
            near = {each for n in here for each in (*self.tasks[n].after, *self._behind[n])}
            new = {self.tasks[each].lane for each in near} - found
            found |= new
            waiting += new
        numbers = [number for lane in found for number in self._on[lane]]
        old = {number: self.times[number] for number in numbers if number in self.times}
        self.times |= simulated({number: self.tasks[number] for number in numbers})
        self.looked_at += len(numbers)
        self._end(found)
        return old

    def _end(self, lanes: Collection[int]) -> None:
        for lane in lanes:
            self._ends[lane] = max((self.times[n].end for n in self._on[lane]), default=0.0)
