"""Simulates a worker coarsely: its visits flow, at the speed that the real queues give their mix.

How much work devices do in a second while certain visits share them is found once for each mix, by
the real queues on a virtual clock (``plan/simulate/worker.py``), with few microbatches of each.
Between two events, the visits share that as the worker's rule says. The number of tasks does not
matter then, so that a search of many trials is simulated in the time of its decisions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.pick import oldest_first
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.simulate.worker import (
    EndedVisit,
    SimulatedDevices,
    TierTotals,
    WorkerSimulation,
    moved_bytes,
)

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U

FEW_WINDOWS = 4
"""Optimizer steps of each visit that a mix is tried with, at least."""

MOST_MICROBATCHES = 16
"""Of a visit that is tried, unless its window has more."""

_NEGLIGIBLE = 1e-9
"""The part of a visit that counts as nothing, for rounding."""


@dataclass(frozen=True)
class Flow:
    """Describes a visit that flows.

    Args:
        spec: it, whichever its number is.
    """

    spec: VisitSpec

    @cached_property
    def seconds(self) -> float:
        """Return the device seconds of all its tasks."""
        graph, shards = self.spec.graph, self.spec.shards
        each = sum(s.forward + (s.backward if graph.training else 0.0) for s in shards)
        updates = sum(s.update for s in shards) if graph.training else 0.0
        return graph.microbatches * each + graph.windows * updates

    @property
    def grain(self) -> float:
        """Return the device seconds of an optimizer step, by which visits take turns."""
        return self.seconds / self.spec.graph.windows

    def shortened(self, visit: int, seconds: float) -> VisitSpec:
        """Return a visit of about so many device seconds, preferred as the whole one is."""
        graph = self.spec.graph
        windows = max(FEW_WINDOWS, round(seconds / max(self.grain, 1e-12)))
        most = max(FEW_WINDOWS * graph.window, MOST_MICROBATCHES)
        microbatches = min(windows * graph.window, most, graph.microbatches)
        left = self.seconds * (1 - microbatches / graph.microbatches)
        return replace(
            self.spec,
            visit=visit,
            graph=replace(graph, microbatches=microbatches),
            later_seconds=self.spec.later_seconds + left,
        )


@dataclass(frozen=True)
class Mix:
    """Tells what a worker does while certain visits share it.

    Args:
        work: the device seconds of tasks that are done in a second.
        tiers: the peaks, and the bytes that move with each device second.
    """

    work: float
    tiers: TierTotals


class Mixes:
    """Finds out what mixes of visits do, each once; workers of one kind share it."""

    def __init__(self, devices: SimulatedDevices) -> None:
        self._devices = devices
        self._flows: dict[tuple[TaskKind, int, int], tuple[int, Flow]] = {}
        self._numbers: dict[Flow, int] = {}
        self._kinds: dict[VisitSpec, int] = {}
        self._mixes: dict[tuple[int, ...], Mix] = {}
        self._examples: list[Flow] = []

    def flow(self, kind: TaskKind, trial: int, partition: int) -> tuple[int, Flow]:
        """Return a task as a flow, and the number of its kind; visits of one kind flow alike."""
        key = kind, trial, partition
        if key not in self._flows:
            found = Flow(replace(self._devices.visit(kind, trial, partition, 0), source=None))
            # Of how many microbatches it consists does not matter to the speed.
            alike = replace(found.spec, graph=replace(found.spec.graph, microbatches=1))
            number = self._kinds.setdefault(alike, len(self._kinds))
            if number == len(self._examples):
                self._examples.append(found)
            self._flows[key] = number, found
        return self._flows[key]

    def of(self, kinds: Sequence[int]) -> Mix:
        """Return what a worker does with visits of these kinds."""
        key = tuple(sorted(kinds))
        if key not in self._mixes:
            self._mixes[key] = self._tried(key)
        return self._mixes[key]

    def _tried(self, kinds: Sequence[int]) -> Mix:
        flows = [self._examples[kind] for kind in kinds]
        longest = max(min(f.seconds, FEW_WINDOWS * f.grain) for f in flows)
        specs = {number: f.shortened(number, longest) for number, f in enumerate(flows)}

        def seconds(action: Action) -> float:
            shard = specs[action.trial].shards[action.shard]
            return self._devices.rates.seconds(action, shard)

        shape = self._devices
        simulation = WorkerSimulation(
            list(specs.values()), shape.budgets, shape.host_budget, shape.rule, seconds
        )
        timeline = simulation.run()
        computing = [each for each in timeline.done if each.action.kind.computes]
        ends = dict[int, float]()
        for each in computing:
            ends[each.action.trial] = each.end
        # What is loaded first is loaded once in a whole visit, and at the end devices wait.
        until = min(ends.values(), default=0.0)
        since = min((e.end for e in computing), default=0.0)
        worked = sum(max(0.0, min(e.end, until) - max(e.begin, since)) for e in computing)
        work = worked / (until - since) if until > since else 1.0
        tiers = TierTotals(dict(timeline.peak))
        moved, all_work = moved_bytes(timeline.done, specs), timeline.busy
        if all_work > 0:
            tiers.add(moved, 1 / all_work)
        return Mix(work or 1.0, tiers)


@dataclass(slots=True)
class _Flowing:
    """Holds a visit under way; ``left`` is in device seconds."""

    kind: int
    flow: Flow
    began: float
    left: float
    rate: float = 0.0
    announced: bool = False


@dataclass
class FluidClock:
    """Takes the steps of one worker whose visits flow; a visit has the number of its attempt."""

    devices: SimulatedDevices
    mixes: Mixes
    totals: TierTotals = field(default_factory=TierTotals)
    next_moment: float = math.inf

    def __post_init__(self) -> None:
        """Begin without a visit."""
        self._visits: dict[int, _Flowing] = {}
        self._now = 0.0
        self._mix = Mix(0.0, TierTotals())

    def start(self, now: float, kind: TaskKind, trial: int, partition: int, visit: int) -> None:
        """Let the worker accept a task."""
        self._advance(now)
        number, flow = self.mixes.flow(kind, trial, partition)
        self._visits[visit] = _Flowing(number, flow, now, flow.seconds)
        self._share()

    def cancel(self, now: float, visit: int) -> None:
        """Let the worker give up a task that has not ended."""
        self._advance(now)
        self._visits.pop(visit, None)
        self._share()

    def step(self) -> tuple[list[int], list[EndedVisit]]:
        """Let the next moment happen; return the visits that begin to end, and those that ended."""
        now = self.next_moment
        self._advance(now)
        ending, ended = [], []
        for number, visit in list(self._visits.items()):
            close = _NEGLIGIBLE * max(visit.flow.seconds, 1.0)
            if visit.left <= visit.flow.grain + close and not visit.announced:
                visit.announced = True
                if visit.flow.spec.graph.training:
                    ending.append(number)
            if visit.left <= close:
                del self._visits[number]
                ended.append(EndedVisit(number, now - visit.began, visit.flow.seconds))
        self._share()
        return ending, ended

    def _advance(self, now: float) -> None:
        passed = now - self._now
        self._now = now
        done = 0.0
        for visit in self._visits.values():
            visit.left = max(0.0, visit.left - visit.rate * passed)
            done += visit.rate * passed
        if done:
            self.totals.add(self._mix.tiers, done)

    def _share(self) -> None:
        """Share the devices among the visits, and find out when that changes."""
        self.next_moment = math.inf
        if not self._visits:
            return
        self._mix = self.mixes.of([each.kind for each in self._visits.values()])
        free = self._mix.work
        turns = self._turns()
        for number, group in enumerate(turns):
            most = [self.mixes.of([each.kind]).work for each in group]
            given = min(free, sum(most))
            free -= given
            for each, alone in zip(group, most, strict=True):
                each.rate = given * alone / sum(most)
                self._wait_for(each)
            if number and self.devices.rule is not oldest_first:
                self._wait_for_turn(turns[number - 1][0], group[0])

    def _turns(self) -> list[list[_Flowing]]:
        """Return the visits in the order of the worker's rule; those that take turns are one."""
        visits = list(self._visits.values())
        if self.devices.rule is oldest_first:
            return [[each] for each in visits]
        visits.sort(key=lambda each: -each.left)
        turns: list[list[_Flowing]] = []
        for each in visits:
            if turns and turns[-1][0].left - each.left <= turns[-1][0].flow.grain:
                turns[-1].append(each)
            else:
                turns.append([each])
        return turns

    def _wait_for(self, visit: _Flowing) -> None:
        if visit.rate <= 0:
            return
        left = visit.left
        if not visit.announced and left > visit.flow.grain:
            left -= visit.flow.grain
        self.next_moment = min(self.next_moment, self._now + left / visit.rate)

    def _wait_for_turn(self, before: _Flowing, visit: _Flowing) -> None:
        """Look again when the one before has as little left as this one."""
        nearer = before.rate - visit.rate
        far = before.left - visit.left - before.flow.grain / 2
        if nearer > 0 and far > 0:
            self.next_moment = min(self.next_moment, self._now + far / nearer)
