"""Simulates a worker: the real queues on a virtual clock, with simulated devices.

It runs alone, or ``plan/simulate/run.py`` takes its steps beside those of other workers.

A device computes, loads and writes back at the same time, one action of each kind after the other;
without double buffering it does one action of any kind after the other.
Transfers from other workers and to disk go one after the other too. Every action is checked against
the places and bytes of ``plan/schedules/validate.py`` when it begins and ends.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cerebro_hydra.plan.costs.moves import FREE_MOVES, MoveRates
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    Answer,
    DeviceLost,
    ShardArrived,
    VisitAdded,
    VisitCancelled,
    VisitEnded,
    VisitRestarted,
    VisitsExpected,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.ledger import PartBytes
from cerebro_hydra.plan.queues.pick import DEFAULT_PICK, PICKS, Rule
from cerebro_hydra.plan.queues.visit_spec import VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.validate import Key, MemoryCheck

Lane = tuple[int, str]  # a device or HOST, and what it does there


@dataclass(frozen=True, slots=True)
class DoneAction:
    """Tells when an action began and ended."""

    action: Action
    begin: float
    end: float


@dataclass(slots=True)
class WorkerTimeline:
    """Holds what happened at a simulated worker; ``units`` counts those of each visit."""

    devices: int
    done: list[DoneAction] = field(default_factory=list)
    given: list[Answer] = field(default_factory=list)
    units: Counter[int] = field(default_factory=Counter)
    peak: dict[int, int] = field(default_factory=dict)

    @property
    def makespan(self) -> float:
        """Return the moment at which the last task ended."""
        return max((each.end for each in self.done if each.action.kind.computes), default=0.0)

    @property
    def busy(self) -> float:
        """Return the seconds that all devices computed."""
        return sum(each.end - each.begin for each in self.done if each.action.kind.computes)

    @property
    def utilisation(self) -> float:
        """Return the share of the devices' time in which they computed."""
        return self.busy / (self.devices * self.makespan)

    def outcome(self, visit: int) -> str:
        """Return how a visit ended."""
        return next(a.outcome for a in self.given if isinstance(a, VisitEnded) and a.visit == visit)


class WorkerSimulation:
    """Runs the queues of one worker once.

    Args:
        specs: the visits that are added at 0 seconds.
        seconds: how long an action takes; its device is its place.
        later: more events, with their seconds.
        hand_over: seconds from the end of a task until what waited for it can begin on a device
            that was given nothing else.
        observe: is called with the queues after every event.
    """

    def __init__(
        self,
        specs: Sequence[VisitSpec],
        budgets: Sequence[int | None],
        host_budget: int | None,
        rule: Rule,
        seconds: Callable[[Action], float],
        *,
        double_buffering: bool = True,
        later: Sequence[tuple[float, WorkerEvent]] = (),
        hand_over: float = 0.0,
        observe: Callable[[WorkerState], None] = lambda state: None,
    ) -> None:
        self.state = WorkerState(budgets, host_budget, rule, double_buffering=double_buffering)
        self.timeline = WorkerTimeline(len(budgets))
        self._seconds, self._observe = seconds, observe
        self._hand_over = hand_over
        self._double_buffering = double_buffering
        self._state_bytes: dict[Key, int] = {}
        self._apart: dict[Key, PartBytes] = {}
        self._activations: dict[Key, int] = {}
        self._keeping: set[int] = set()
        self._at_home: set[int] = set()
        self.check = MemoryCheck(
            dict(enumerate(budgets)),
            host_budget,
            self._state_bytes,
            self._activations,
            self._keeping,
            self._apart,
            self._at_home,
        )
        self._now = 0.0
        self._lanes: dict[Lane, deque[Action]] = {}
        self._begun: dict[Lane, float] = {}  # when the first action of each lane began
        self._heap: list[tuple[float, int, WorkerEvent | Lane]] = []
        self._scheduled = 0
        for spec in specs:
            self.add(0.0, VisitAdded(spec))
        for moment, event in later:
            self.add(moment, event)

    def run(self) -> WorkerTimeline:
        """Run until nothing is left to happen, and return what happened.

        Raises:
            RuntimeError: the queues stand still with visits that are not over.
        """
        while self._heap:
            self.step()
        if left := list(self.state.visits):
            raise RuntimeError(f"the queues stand still at {self._now:.3f} s with visits {left}")
        self.timeline.peak = {
            place: peak for place, peak in self.check.peak.items() if place is not None
        }
        return self.timeline

    @property
    def next_moment(self) -> float:
        """Return when the next thing happens; infinity if nothing is left to happen."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, moment: float, event: WorkerEvent) -> None:
        """Let an event happen at a moment that is not past."""
        self._schedule(moment, event)

    def step(self) -> list[Answer]:
        """Let the next moment happen, and return what the queues answered."""
        self._now = self._heap[0][0]
        events = []
        while self._heap and self._heap[0][0] == self._now:
            happens = heapq.heappop(self._heap)[2]
            event = self._end(happens) if isinstance(happens, tuple) else happens
            if (
                self._hand_over
                and event is not happens
                and isinstance(event, ActionDone)
                and event.action.kind.computes
            ):
                self._schedule(self._now + self._hand_over, event)
                continue
            events.append(event)
            self._before(event)
        answers = self.state.handle(events)
        for answer in answers:
            self._carry_out(answer)
        self._observe(self.state)
        return answers

    def _schedule(self, moment: float, happens: WorkerEvent | Lane) -> None:
        heapq.heappush(self._heap, (moment, self._scheduled, happens))
        self._scheduled += 1

    def _before(self, event: WorkerEvent) -> None:
        if isinstance(event, VisitAdded):
            if event.spec.keeps_all and event.spec.graph.training:
                self._keeping.add(event.spec.visit)
            if event.spec.updates_at_home:
                self._at_home.add(event.spec.visit)
            for number, shard in enumerate(event.spec.shards):
                self._state_bytes[event.spec.visit, number] = shard.state
                self._apart[event.spec.visit, number] = shard.apart
                self._activations[event.spec.visit, number] = shard.activations
        elif isinstance(event, VisitCancelled):
            self.check.abandon(event.visit)
        elif isinstance(event, DeviceLost):
            self.check.lose(event.device)
            for lane in [lane for lane in self._lanes if lane[0] == event.device]:
                del self._lanes[lane]
            self._heap = [each for each in self._heap if _place_of(each[2]) != event.device]
            heapq.heapify(self._heap)

    def _carry_out(self, answer: Answer) -> None:
        if isinstance(answer, tuple):
            self.timeline.units[answer[0].trial] += 1
            for task in answer:
                self._carry_out(task)
            return
        self.timeline.given.append(answer)
        if isinstance(answer, VisitRestarted):
            self.check.abandon(answer.visit)
        if not isinstance(answer, Action):
            return
        if answer.kind is ActionKind.RECV:
            self.check.begin_anew(answer.trial)
        if answer.kind is ActionKind.DROP:
            self.check.begin(answer)
            self.check.end(answer)
            return
        lane = self._lane(answer)
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append(answer)
        if len(waiting) == 1:
            self._begin(lane)

    def _lane(self, action: Action) -> Lane:
        place = HOST if action.device is None else action.device
        if place != HOST and not self._double_buffering:
            return place, "everything"
        return place, "compute" if action.kind.computes else action.kind

    def _begin(self, lane: Lane) -> None:
        action = self._lanes[lane][0]
        self.check.begin(action)
        self._begun[lane] = self._now
        self._schedule(self._now + self._seconds(action), lane)

    def _end(self, lane: Lane) -> WorkerEvent:
        waiting = self._lanes[lane]
        action = waiting.popleft()
        self.check.end(action)
        self.timeline.done.append(DoneAction(action, self._begun[lane], self._now))
        if waiting:
            self._begin(lane)
        if action.kind is ActionKind.RECV:
            return ShardArrived(action.trial, action.shard)
        return ActionDone(action, self._seconds(action))


def _place_of(happens: WorkerEvent | Lane) -> int | None:
    """Return the place whose action ends, or has ended."""
    if isinstance(happens, tuple):
        return happens[0]
    return happens.action.device if isinstance(happens, ActionDone) else None


@dataclass(frozen=True, slots=True)
class SimulatedDevices:
    """Describes the devices of a worker and what its residents do there.

    Args:
        budgets: the bytes of each device; None means no limit.
        residents: how many sub-epochs and evaluations the worker holds at once.
        visit: describes a task by its kind, trial and partition, and by the number that its visit
        has. host_budget: the bytes of DRAM; None means no limit.
        rates: how long moves take.
        rule: picks a visit for a free device.
        fluid: whether visits flow at the speed that a mix of them has (``plan/simulate/fluid.py``),
            instead of task by task.
    """

    budgets: tuple[int | None, ...]
    residents: int
    visit: Callable[[TaskKind, int, int, int], VisitSpec]
    host_budget: int | None = None
    rates: MoveRates = FREE_MOVES
    rule: Rule = PICKS[DEFAULT_PICK]
    fluid: bool = False


@dataclass(frozen=True, slots=True)
class EndedVisit:
    """Tells how long a visit took, and how long devices computed for it."""

    visit: int
    seconds: float
    device_seconds: float


@dataclass(slots=True)
class TierTotals:
    """Holds what a worker's tiers had and moved.

    Args:
        peak: the most bytes that each device had, and DRAM under `HOST`.
        copied: the bytes between DRAM and devices, both ways.
        disk: those between disk and DRAM, both ways.
    """

    peak: dict[int, int] = field(default_factory=dict)
    copied: float = 0.0
    disk: float = 0.0

    def add(self, other: TierTotals, share: float = 1.0) -> None:
        """Add what another worker or time had, or the share of it that was moved here."""
        self.copied += other.copied * share
        self.disk += other.disk * share
        for place, peak in other.peak.items():
            self.peak[place] = max(peak, self.peak.get(place, 0))


def moved_bytes(done: Iterable[DoneAction], specs: Mapping[int, VisitSpec]) -> TierTotals:
    """Return the bytes that actions moved."""
    found = TierTotals()
    for action in (each.action for each in done):
        if action.kind in (ActionKind.LOAD, ActionKind.SPILL):
            nbytes = specs[action.trial].shards[action.shard].moved(action)
            if action.device == HOST:
                found.disk += nbytes
            else:
                found.copied += nbytes
    return found


class DeviceClock:
    """Takes the steps of one worker's devices; a visit has the number of its attempt."""

    def __init__(self, devices: SimulatedDevices) -> None:
        self._devices = devices
        self._specs: dict[int, VisitSpec] = {}
        self._began: dict[int, float] = {}
        self._computed: dict[int, float] = {}
        self._announced: set[int] = set()
        self._counted = 0  # of the actions that were done
        self._simulation = WorkerSimulation(
            [], devices.budgets, devices.host_budget, devices.rule, self._seconds
        )

    @property
    def next_moment(self) -> float:
        """Return when the next thing happens; infinity if nothing is left to happen."""
        return self._simulation.next_moment

    @property
    def totals(self) -> TierTotals:
        """Return what the tiers had and moved so far."""
        found = moved_bytes(self._simulation.timeline.done, self._specs)
        peak = self._simulation.check.peak.items()
        found.peak = {place: most for place, most in peak if place is not None}
        return found

    def start(self, now: float, kind: TaskKind, trial: int, partition: int, visit: int) -> None:
        """Let the worker accept a task."""
        self._specs[visit] = self._devices.visit(kind, trial, partition, visit)
        self._began[visit], self._computed[visit] = now, 0.0
        self._simulation.add(now, VisitAdded(self._specs[visit]))

    def expect(self, now: float, tasks: bool) -> None:
        """Let the worker know whether other tasks may follow."""
        self._simulation.add(now, VisitsExpected(tasks))

    def cancel(self, now: float, visit: int) -> None:
        """Let the worker give up a task that has not ended."""
        self._simulation.add(now, VisitCancelled(visit))

    def step(self) -> tuple[list[int], list[EndedVisit]]:
        """Let the next moment happen; return the visits that begin to end, and those that ended.

        Raises:
            RuntimeError: the devices can't hold a visit.
        """
        now = self.next_moment
        answers = self._simulation.step()
        done = self._simulation.timeline.done
        for each in done[self._counted :]:
            if each.action.kind.computes:
                self._computed[each.action.trial] += each.end - each.begin
        self._counted = len(done)
        ending = [
            number
            for number, visit in self._simulation.state.visits.items()
            if visit.status == "open" and visit.spec.graph.training and visit.is_in_last_window
        ]
        ending = [number for number in ending if number not in self._announced]
        self._announced.update(ending)
        ended = []
        for answer in answers:
            if isinstance(answer, VisitEnded) and answer.outcome == "refused":
                raise RuntimeError(f"visit {answer.visit} was refused: {answer.reason}")
            if isinstance(answer, VisitEnded) and answer.outcome == "finished":
                began, computed = self._began[answer.visit], self._computed[answer.visit]
                ended.append(EndedVisit(answer.visit, now - began, computed))
        return ending, ended

    def _seconds(self, action: Action) -> float:
        shard = self._specs[action.trial].shards[action.shard]
        return self._devices.rates.seconds(action, shard)
