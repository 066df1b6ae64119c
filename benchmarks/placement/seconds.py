"""Tells how long a plan takes after a change, by looking again at what the change touches alone.

`TimelineSeconds` asks a timeline of coarse tasks, `QueueSeconds` the queues of a worker themselves.
The queues of devices that no trial and no lack of DRAM connects know nothing of one another, so
only those are simulated again whose trials have changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.placement.options import Changed, PlacementOptions
from benchmarks.placement.plan import (
    JointPlan,
    TrialPlacement,
    seconds_of,
    simulated_visits,
)
from benchmarks.placement.tasks import on_lanes
from benchmarks.placement.timeline import TaskTimeline, TimedTask
from cerebro_hydra.errors import ConfigurationError


class TimelineSeconds:
    """Knows the timeline of placed trials, of which each has devices."""

    def __init__(
        self, options: PlacementOptions, placed: Sequence[TrialPlacement], order: Sequence[int]
    ) -> None:
        self._options, self._placed = options, list(placed)
        self._first = {number: place << 20 for place, number in enumerate(order)}
        tasks: dict[int, TimedTask] = {}
        for number, each in enumerate(placed):
            tasks |= self._tasks(number, each)
        self.timeline = TaskTimeline(tasks)
        self._before: Changed = {}

    @property
    def seconds(self) -> float:
        """Return how long all take."""
        return self.timeline.makespan

    def slowest(self) -> Sequence[int]:
        """Return the trials of which one should be changed: any."""
        return range(len(self._placed))

    def change(self, changed: Changed) -> None:
        """Place some trials anew."""
        tasks: dict[int, TimedTask | None] = {}
        self._before = {number: self._placed[number] for number in changed}
        for number, placed in changed.items():
            tasks |= dict.fromkeys(self._tasks(number, self._placed[number]))
            tasks |= self._tasks(number, placed)
            self._placed[number] = placed
        self.timeline.change(tasks)

    def undo(self) -> None:
        """Take the last change back."""
        for number, placed in self._before.items():
            self._placed[number] = placed
        self.timeline.undo()

    def _tasks(self, number: int, placed: TrialPlacement) -> Mapping[int, TimedTask]:
        tasks = self._options.tasks(number, placed)
        return on_lanes(tasks, placed.devices, self._first[number])


class QueueSeconds:
    """Knows how long the queues of a worker take for a plan; infinity if they can't do it."""

    def __init__(self, options: PlacementOptions, plan: JointPlan) -> None:
        self._options, self._plan = options, plan
        self._placed = list(plan.placements)
        self._before: Changed = {}
        self._known: dict[tuple[tuple[int, TrialPlacement], ...], float] = {}
        self.simulated = self.asked = 0  # visits, of those that were simulated and of all

    @property
    def seconds(self) -> float:
        """Return how long all take."""
        return max(map(self._seconds, self._groups()))

    def slowest(self) -> Sequence[int]:
        """Return the trials that take longest, with those that share devices with them."""
        return max(self._groups(), key=self._seconds)

    def change(self, changed: Changed) -> None:
        """Place some trials anew."""
        self._before = {number: self._placed[number] for number in changed}
        for number, placed in changed.items():
            self._placed[number] = placed

    def undo(self) -> None:
        """Take the last change back."""
        for number, placed in self._before.items():
            self._placed[number] = placed

    def _groups(self) -> list[tuple[int, ...]]:
        """Return the trials that share devices or lack DRAM together, in the plan's order."""
        order, devices = self._plan.order, self._options.devices
        if not self._dram_is_enough():
            return [order]
        group_of = {device: device for device in devices}
        for placed in self._placed:
            joined = {group_of[device] for device in placed.devices or devices}
            for device, group in group_of.items():
                if group in joined:
                    group_of[device] = min(joined)
        groups: dict[int, list[int]] = {}
        for number in order:
            first = (self._placed[number].devices or devices)[0]
            groups.setdefault(group_of[first], []).append(number)
        return [tuple(each) for each in groups.values()]

    def _dram_is_enough(self) -> bool:
        """Return whether all trials can be in DRAM, beside another copy of the largest."""
        if self._options.memory.host is None:
            return True
        visits = [self._options.visit(n, placed) for n, placed in enumerate(self._placed)]
        need = sum(visit.state_bytes + visit.host_boundary_bytes for visit in visits)
        return need + max(visit.state_bytes for visit in visits) <= self._options.memory.host

    def _seconds(self, group: tuple[int, ...]) -> float:
        """Return how long a group takes."""
        key = tuple((number, self._placed[number]) for number in group)
        self.asked += len(group)
        if key not in self._known:
            self.simulated += len(group)
            self._known[key] = self._simulate(group)
        return self._known[key]

    def _simulate(self, group: tuple[int, ...]) -> float:
        try:
            visits = [self._options.visit(number, self._placed[number]) for number in group]
            timeline = simulated_visits(visits, self._options.memory, len(visits), self._plan.pick)
        except ConfigurationError:
            return math.inf
        return seconds_of(timeline)
