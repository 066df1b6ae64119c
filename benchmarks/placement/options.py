"""Knows how each trial of a worker could train, and makes random changes of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random

from benchmarks.placement.every import plain_placement
from benchmarks.placement.plan import TrialPlacement, UncutTrial, planned_visit
from benchmarks.placement.tasks import ListTask, on_lanes, tasks_of
from benchmarks.placement.timeline import simulated
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.schedules.registry import FLUSHED, is_pipelined
from cerebro_hydra.plan.sizing.bill import WorkerMemory
from cerebro_hydra.plan.sizing.cuts import balance

MORE_SHARDS = 6
"""So many shards more than the fewest that fit are tried at first."""

MOST_RANGES = 2
"""So many ranges a device has at first, where they are interleaved."""

Changed = Mapping[int, TrialPlacement]


class PlacementOptions:
    """Holds the trials and the worker, and what was found out about placements so far."""

    def __init__(self, trials: Sequence[UncutTrial], memory: WorkerMemory) -> None:
        self.trials, self.memory = trials, memory
        self.devices = range(len(memory.devices))
        self.visit = lru_cache(maxsize=None)(self._visit)
        self._tasks = lru_cache(maxsize=None)(self._tasks_of)
        self.shortest = lru_cache(maxsize=None)(self._shortest)
        self.cuts = lru_cache(maxsize=None)(self._cuts)

    def tasks(self, number: int, placed: TrialPlacement) -> tuple[ListTask, ...]:
        """Return the tasks of a placed trial; none if its devices can't hold it."""
        budgets = (self.memory.devices[device] for device in placed.devices)
        known = [each for each in budgets if each is not None]
        anonymous = replace(placed, devices=tuple(range(len(placed.devices))))
        return self._tasks(number, anonymous, min(known, default=None))

    def _visit(self, number: int, placed: TrialPlacement) -> VisitSpec:
        """Return the visit of a placed trial.

        Raises:
            ConfigurationError: the trial can't be placed so.
        """
        return planned_visit(number, self.trials[number], placed)

    def _tasks_of(
        self, number: int, placed: TrialPlacement, budget: int | None
    ) -> tuple[ListTask, ...]:
        try:
            visit = self.visit(number, placed)
        except ConfigurationError:
            return ()
        need = visit.whole_need if visit.is_pipelined else visit.device_need
        if budget is not None and need > budget:
            return ()
        return tasks_of(visit, budget, self.memory.rates.device)

    def alone(self, number: int, placed: TrialPlacement) -> float:
        """Return the seconds that a placed trial takes where nobody else is."""
        tasks = self.tasks(number, placed)
        places = range(1 + max(task.place for task in tasks))
        return max(times.end for times in simulated(on_lanes(tasks, places, 0)).values())

    def _shortest(self, number: int) -> TrialPlacement:
        """Return the placement on the largest device that takes the least time there alone."""
        trial, budgets = self.trials[number], self.memory.devices
        largest = max(self.devices, key=lambda d: (budgets[d] is None, budgets[d] or 0))
        plain = replace(plain_placement(number, trial, self.memory), devices=(largest,))
        fewest = len(plain.cuts) + 1
        found = [plain] + [
            TrialPlacement(self.cuts(number, shards, recompute), recompute, devices=(largest,))
            for recompute in (False, True)
            for shards in range(fewest, min(fewest + MORE_SHARDS, trial.graph.shards) + 1)
            if trial.units(recompute)
        ]
        fit = [placed for placed in found if self.tasks(number, placed)]
        return min(fit, key=lambda placed: self.alone(number, placed))

    def _cuts(self, number: int, shards: int, recompute: bool) -> tuple[int, ...]:
        """Return where so many shards of equal time begin."""
        units = self.trials[number].units(recompute)
        parts = balance([unit.forward + unit.backward for unit in units], shards)
        return tuple(part.start for part in parts[1:])

    # ------------------------------------------------------------------ random changes

    def change(
        self, now: Sequence[TrialPlacement], among: Sequence[int], random: Random
    ) -> Changed:
        """Return other placements for some trials; none if devices can't hold what was drawn.

        Args:
            among: the trials of which one is changed.
        """
        number = random.choice(among)
        kinds = (self._move, self._swap, self._shift, self._recut, self._reschedule)
        changed = random.choice(kinds)(number, now, random)
        return changed if all(self.tasks(n, placed) for n, placed in changed.items()) else {}

    def _move(self, number: int, now: Sequence[TrialPlacement], random: Random) -> Changed:
        """Take one of a trial's lists to another device."""
        mine = now[number]
        others = [device for device in self.devices if device not in mine.devices]
        if not others:
            return {}
        return {number: _elsewhere(mine, random.choice(mine.devices), random.choice(others))}

    def _swap(self, number: int, now: Sequence[TrialPlacement], random: Random) -> Changed:
        """Let two trials have one of each other's devices."""
        other = random.randrange(len(now))
        mine, theirs = now[number], now[other]
        ours, other_device = random.choice(mine.devices), random.choice(theirs.devices)
        if other_device in mine.devices or ours in theirs.devices:
            return {}
        return {
            number: _elsewhere(mine, ours, other_device),
            other: _elsewhere(theirs, other_device, ours),
        }

    def _shift(self, number: int, now: Sequence[TrialPlacement], random: Random) -> Changed:
        """Move a cut by a unit."""
        mine = now[number]
        if not mine.cuts:
            return {}
        at, by = random.randrange(len(mine.cuts)), random.choice((-1, 1))
        cuts = tuple(cut + by * (k == at) for k, cut in enumerate(mine.cuts))
        return {number: replace(mine, cuts=cuts)}

    def _recut(self, number: int, now: Sequence[TrialPlacement], random: Random) -> Changed:
        """Take another number of shards, or the other way with activations."""
        mine, trial = now[number], self.trials[number]
        shards, recompute = len(mine.cuts) + 1, mine.recompute
        if random.random() < 0.5:
            recompute = not recompute
        else:
            shards += random.choice((-1, 1))
        least = len(mine.devices)
        if not (least <= shards <= trial.graph.shards and trial.units(recompute)):
            return {}
        cuts = self.cuts(number, shards, recompute)
        return {number: replace(mine, cuts=cuts, recompute=recompute)}

    def _reschedule(self, number: int, now: Sequence[TrialPlacement], random: Random) -> Changed:
        """Take another schedule, and the devices for it at random."""
        trial = self.trials[number]
        schedule = random.choice([*FLUSHED] if trial.moves else ["sequential"])
        most = min(len(self.devices), trial.graph.shards)
        if not is_pipelined(schedule) or most == 1:
            device = random.choice(self.devices)
            return {number: replace(self.shortest(number), devices=(device,))}
        count = random.randint(2, most)
        ranges = min(MOST_RANGES, trial.graph.shards // count) if schedule == "interleaved" else 1
        recompute = now[number].recompute
        cuts = self.cuts(number, count * ranges, recompute)
        places = tuple(random.sample(self.devices, count))
        return {number: TrialPlacement(cuts, recompute, schedule, places)}


def _elsewhere(placed: TrialPlacement, leaves: int, comes: int) -> TrialPlacement:
    devices = tuple(comes if device == leaves else device for device in placed.devices)
    return replace(placed, devices=devices)
