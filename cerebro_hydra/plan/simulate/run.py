"""Simulates a run: the real state machine on a virtual clock, with simulated agents.

A worker of one device takes one task at a time, which lasts as long as it is told. A worker of
several devices has real queues, which run the tasks shard by shard (``plan/simulate/worker.py``).

A closed search knows all its trials before the first one trains.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Protocol

from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.hop.trials import TaskKind
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.messages.config import HopConfig, TrialConfig
from cerebro_hydra.plan.messages.events import (
    Event,
    TrialAdded,
)
from cerebro_hydra.plan.policy.policy import Scheduler
from cerebro_hydra.plan.simulate.fluid import FluidClock, Mixes
from cerebro_hydra.plan.simulate.worker import DeviceClock, SimulatedDevices, TierTotals

TaskSeconds = Callable[[TaskKind, int, int], float]  # by kind, trial and partition
ENDING_SHARE = 0.1  # of a sub-epoch's time is left when it says that it is ending


@dataclass(frozen=True, slots=True)
class WorkerCrash:
    """A worker dies at ``at`` seconds and comes back, empty, ``back_after`` seconds later."""

    at: float
    worker: int
    back_after: float


@dataclass(frozen=True, slots=True)
class Overheads:
    """Says what a simulated run spends beside its tasks.

    Args:
        hop: what it costs to bring a trial's state to a worker, by trial, and by whether that
            has had no state of it.
        wait: the seconds from a task that has its shards to its first forward, by whether the
            worker has had no task of the trial.
        join: when a worker joins, by number.
        exchange: what a sub-epoch's replicas spend on their gradients, by trial and how many.
    """

    hop: Callable[[int, bool], ev.Hop] = lambda trial, first: ev.Hop(0, 0, 0.0)
    wait: Callable[[bool], float] = lambda first: 0.0
    join: Callable[[int], float] = lambda worker: 0.0
    exchange: Callable[[int, Sequence[int]], float] = lambda trial, partitions: 0.0


NO_OVERHEADS = Overheads()
"""Those of a run that only trains."""


@dataclass(slots=True)
class SimulatedTimeline:
    """Holds the decisions and visits of a simulated run, its makespan in seconds and its bytes.

    Args:
        records: events with their instructions, and when they were, unless something else takes
            them.
        hopped: the bytes that were moved between workers.
        tiers: of all workers together; a peak is that of one worker.
    """

    makespan: float = 0.0
    records: list[tuple[ev.Event, list[ins.Instruction]]] = field(default_factory=list)
    visit_logs: list[list[tuple[int, int]]] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    hopped: int = 0
    tiers: TierTotals = field(default_factory=TierTotals)


class SimulatedSearch(Protocol):
    """Says what a simulated run trains."""

    @property
    def config(self) -> HopConfig:
        """Return what is fixed for the run."""
        ...

    def events(self) -> Sequence[Event]:
        """Return the events that begin the run."""
        ...

    def after(
        self, now: float, event: Event, instructions: Sequence[ins.Instruction]
    ) -> Sequence[tuple[float, Event]]:
        """Return what the search decides on an event, and when that happens."""
        ...


Clock = DeviceClock | FluidClock
_Task = ins.StartSubEpoch | ins.Evaluate
_HeldState = tuple[str, int, int]  # incarnation, trial, state


class Simulation:
    """Runs a search once on simulated workers.

    Args:
        search: the trials and what is fixed for them.
        workers: the partitions of each worker.
        seconds: how long a task takes on a worker of one device.
        overheads: what is spent beside tasks.
        crashes: the workers that die, and when.
        metric: the value of every metric of a trial, by trial and epoch.
        on_decision: is given every event with its instructions; else the timeline keeps them.
        devices: the devices of every worker; None means that each has one.
    """

    def __init__(
        self,
        search: SimulatedSearch,
        workers: Sequence[tuple[int, ...]],
        seconds: TaskSeconds,
        *,
        overheads: Overheads = NO_OVERHEADS,
        crashes: Sequence[WorkerCrash] = (),
        metric: Callable[[int, int], float] = lambda trial, epoch: 1.0,
        on_decision: Callable[[ev.Event, list[ins.Instruction]], object] | None = None,
        devices: SimulatedDevices | None = None,
    ) -> None:
        self.scheduler = Scheduler(search.config)
        self.now = 0.0
        self.timeline = SimulatedTimeline()
        self._on_decision = on_decision or self._keep
        self._workers = workers
        self._search, self._overheads = search, overheads
        self._seconds, self._metric = seconds, metric
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._tasks_expected = True
        self._live: dict[int, str] = {}  # incarnation by worker
        self._incarnations = 0
        self._tasks_of: dict[str, dict[int, _Task]] = {}  # by incarnation and attempt
        # By attempt and incarnation:
        self._computing: set[tuple[int, str]] = set()  # those that have their shards
        self._begun: set[tuple[int, str]] = set()  # whose first forward has begun, or may
        self._held: set[_HeldState] = set()
        self._fetches: dict[_HeldState, str | None] = {}  # the owner of each, None for the store
        self._waiting: dict[_HeldState, list[_HeldState]] = {}  # fetches of what is not made yet
        self._devices = devices
        self._mixes = None if devices is None or not devices.fluid else Mixes(devices)
        self._clocks: dict[str, Clock] = {}  # by incarnation, of workers of several devices
        self._met: set[tuple[str, int]] = set()  # incarnations and trials that they have trained
        self._had: set[tuple[str, int]] = set()  # and of which they have had a state
        self._hops: dict[_HeldState, ev.Hop] = {}  # of states that no task was charged for
        self._configs: dict[int, TrialConfig] = {}
        for event in search.events():
            self._schedule(0.0, partial(self._handle, event))
        for worker in range(len(workers)):
            self._schedule(overheads.join(worker), partial(self._join, worker))
        for crash in crashes:
            self._schedule(crash.at, partial(self._crash, crash))

    def run(self) -> SimulatedTimeline:
        """Run to the end and return what happened.

        Raises:
            RuntimeError: nothing is left to happen, but the run is not over.
        """
        while not self.state.finished:
            self.step()
        self.timeline.makespan = self.now
        for clock in self._clocks.values():
            self.timeline.tiers.add(clock.totals)
        self.timeline.visit_logs = [
            [(visit.epoch, visit.partition) for visit in trial.visits]
            for trial in self.state.trials.values()
        ]
        return self.timeline

    @property
    def state(self) -> HopState:
        """The state of the run."""
        return self.scheduler.state

    def step(self) -> None:
        """Let the next thing happen.

        Raises:
            RuntimeError: nothing is left to happen, but the run is not over.
        """
        if not self._heap:
            raise RuntimeError(f"the run stands still at {self.now:.3f} s: nothing is scheduled")
        self.now, _, happen = heapq.heappop(self._heap)
        happen()

    # ------------------------------------------------------------------ events and instructions

    def _keep(self, event: ev.Event, instructions: list[ins.Instruction]) -> None:
        self.timeline.records.append((event, instructions))
        self.timeline.moments.append(self.now)

    def _schedule(self, moment: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (moment, self._scheduled, happen))
        self._scheduled += 1

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, TrialAdded):
            self._configs[event.config.trial] = event.config
        for happened, instructions in self.scheduler.handle(event):
            self._on_decision(happened, instructions)
            for moment, decided in self._search.after(self.now, happened, instructions):
                self._schedule(moment, partial(self._handle, decided))
            for instruction in instructions:
                self._carry_out(instruction)
        if (expected := self.scheduler.tasks_expected) != self._tasks_expected:
            self._tasks_expected = expected
            for incarnation, clock in self._clocks.items():
                if isinstance(clock, DeviceClock):  # visits that flow have no tasks to choose
                    clock.expect(self.now, expected)
                    self._wake(incarnation)

    def _join(self, worker: int) -> None:
        self._live[worker] = f"worker-{worker}-{self._incarnations}"
        self._incarnations += 1
        self._tasks_of[self._live[worker]] = {}
        joined = ev.WorkerJoined(worker, self._live[worker], self._workers[worker])
        if (devices := self._devices) is not None:
            mixes = self._mixes
            self._clocks[joined.incarnation] = (
                DeviceClock(devices) if mixes is None else FluidClock(devices, mixes)
            )
            joined = replace(joined, devices=len(devices.budgets), residents=devices.residents)
        self._handle(joined)

    def _crash(self, crash: WorkerCrash) -> None:
        incarnation = self._live.pop(crash.worker, None)
        if incarnation is None:
            return
        if clock := self._clocks.pop(incarnation, None):
            self.timeline.tiers.add(clock.totals)
        for task in list(self._tasks_of[incarnation].values()):
            self._remove_task(task)
        self._held = {state for state in self._held if state[0] != incarnation}
        self._fetches = {
            state: source
            for state, source in self._fetches.items()
            if incarnation not in (state[0], source)
        }
        self._handle(ev.WorkerLost(incarnation, "killed"))
        self._schedule(self.now + crash.back_after, partial(self._join, crash.worker))

    def _carry_out(self, instruction: ins.Instruction) -> None:
        match instruction:
            case ins.StartSubEpoch() | ins.Evaluate():
                self._tasks_of[instruction.incarnation][instruction.attempt] = instruction
                self._fetch(instruction.incarnation, instruction.trial, instruction.source)
                self._start_task(instruction)
            case ins.FetchShards():
                self._fetch(instruction.incarnation, instruction.trial, instruction.source)
            case ins.Cancel():
                clock = self._clocks.get(instruction.incarnation)
                if (
                    clock is not None
                    and (instruction.attempt, instruction.incarnation) in self._begun
                ):
                    clock.cancel(self.now, instruction.attempt)
                    self._wake(instruction.incarnation)
                self._remove_task(instruction)
            case ins.Drop():
                state = (instruction.incarnation, instruction.trial, instruction.state)
                self._held.discard(state)
                self._fetches.pop(state, None)
            case ins.MergeMetrics():
                names = self._configs[instruction.trial].custom_metrics
                value = self._metric(instruction.trial, instruction.epoch)
                merged = ev.MetricsMerged(
                    instruction.attempt,
                    instruction.trial,
                    instruction.epoch,
                    dict.fromkeys(names, value),
                )
                self._schedule(self.now, partial(self._handle, merged))
            case ins.Checkpoint():
                saved = ev.Checkpointed(
                    instruction.trial, instruction.state, instruction.incarnation
                )
                self._schedule(self.now, partial(self._handle, saved))

    # ------------------------------------------------------------------ the agents

    def _fetch(self, incarnation: str, trial: int, source: ins.StateSource) -> None:
        state = (incarnation, trial, source.state)
        if state in self._held or state in self._fetches:
            return
        self._fetches[state] = source.incarnation
        self._start_transfer(state)

    def _start_transfer(self, state: _HeldState) -> None:
        """Start the transfer if the owner has published the state."""
        owner = self._fetches[state]
        if owner is None or (owner, *state[1:]) in self._held:
            incarnation, trial, _ = state
            hop = self._overheads.hop(trial, (incarnation, trial) not in self._had)
            self._had.add((incarnation, trial))
            self._hops[state] = hop
            self.timeline.hopped += 0 if owner is None else hop.bytes_moved
            self._schedule(self.now + hop.seconds, partial(self._receive, state))
        else:
            self._waiting.setdefault((owner, *state[1:]), []).append(state)

    def _receive(self, received: _HeldState) -> None:
        if received not in self._fetches:
            return
        del self._fetches[received]
        self._held.add(received)
        incarnation, trial, state = received
        self._handle(ev.StateReceived(trial, state, incarnation))
        for task in list(self._tasks_of[incarnation].values()):
            if (task.trial, task.source.state) == (trial, state):
                self._start_task(task)

    def _start_task(self, task: _Task) -> None:
        state = (task.incarnation, task.trial, task.source.state)
        if state not in self._held or (task.attempt, task.incarnation) in self._computing:
            return
        self._computing.add((task.attempt, task.incarnation))
        first = (task.incarnation, task.trial) not in self._met
        self._met.add((task.incarnation, task.trial))
        if wait := self._overheads.wait(first):
            self._schedule(self.now + wait, partial(self._compute, task))
        else:
            self._compute(task)

    def _compute(self, task: _Task) -> None:
        if task.attempt not in self._tasks_of[task.incarnation]:
            return  # it was cancelled, or its worker died
        self._begun.add((task.attempt, task.incarnation))
        if isinstance(task, ins.StartSubEpoch) and task.replicas:
            self._compute_together(task)
            return
        train = isinstance(task, ins.StartSubEpoch)
        kind: TaskKind = "train" if train else "evaluate"
        (partition,) = task.partitions
        if clock := self._clocks.get(task.incarnation):
            clock.start(self.now, kind, task.trial, partition, task.attempt)
            self._wake(task.incarnation)
            return
        seconds = self._seconds(kind, task.trial, partition)
        if train:
            ending = self.now + seconds * (1 - ENDING_SHARE)
            self._schedule(ending, partial(self._announce_end, task))
        self._schedule(self.now + seconds, partial(self._end_task, task, seconds))

    def _compute_together(self, task: ins.StartSubEpoch) -> None:
        """Let replicas compute when the last of them may begin; each step waits for the slowest."""
        if any((task.attempt, each) not in self._begun for each in task.replicas):
            return
        seconds = max(self._seconds("train", task.trial, each) for each in task.partitions)
        seconds += self._overheads.exchange(task.trial, task.partitions)
        for each in task.replicas:
            rank = self._tasks_of[each][task.attempt]
            self._schedule(self.now + seconds, partial(self._end_task, rank, seconds))

    def _announce_end(self, task: _Task) -> None:
        if task.attempt in self._tasks_of[task.incarnation]:
            self._handle(ev.SubEpochEnding(task.attempt, task.incarnation))

    def _wake(self, incarnation: str) -> None:
        """Have the worker's devices take their next step when it is due."""
        moment = self._clocks[incarnation].next_moment
        if moment < inf:
            self._schedule(moment, partial(self._step_devices, incarnation, moment))

    def _step_devices(self, incarnation: str, moment: float) -> None:
        clock = self._clocks.get(incarnation)
        if clock is None or clock.next_moment > moment:
            return  # it died, or has taken this step already
        ending, ended = clock.step()
        tasks = self._tasks_of[incarnation]
        for attempt in ending:
            if attempt in tasks:
                self._announce_end(tasks[attempt])
        for each in ended:
            if each.visit in tasks:
                self._end_task(tasks[each.visit], each.seconds, each.device_seconds)
        self._wake(incarnation)

    def _end_task(self, task: _Task, seconds: float, device_seconds: float | None = None) -> None:
        if self._tasks_of[task.incarnation].get(task.attempt) is not task:
            return
        self._remove_task(task)
        trial = self._configs[task.trial]
        source = (task.incarnation, task.trial, task.source.state)
        hop = self._hops.pop(source, ev.Hop(0, 0, 0.0))
        value = self._metric(task.trial, task.epoch)
        if isinstance(task, ins.Evaluate):
            compared = self._search.config.metric.removeprefix("val_")
            sums = {"loss": (value, 1), compared: (value, 1)}
            for name in trial.custom_metrics:  # those are merged
                sums.pop(name, None)
            states = dict.fromkeys(trial.custom_metrics)
            evaluated = ev.EvaluationDone(
                task.attempt, task.incarnation, sums, seconds, hop, states, device_seconds
            )
            self._handle(evaluated)
            return
        made = (task.incarnation, task.trial, task.state)
        self._held.add(made)
        digests = tuple(
            (frozen, f"{task.trial}/{task.state}/{shard}")
            for shard, (frozen, _) in enumerate(trial.initial_digests)
        )
        nbytes = trial.nbytes
        trained = ev.SubEpochDone(
            task.attempt, task.incarnation, 1, value, digests, nbytes, seconds, hop,
            device_seconds=device_seconds,
        )  # fmt: skip
        self._handle(trained)
        for state in self._waiting.pop(made, ()):
            if self._fetches.get(state) == task.incarnation:
                self._start_transfer(state)

    def _remove_task(self, task: _Task | ins.Cancel) -> None:
        self._tasks_of[task.incarnation].pop(task.attempt, None)
        self._computing.discard((task.attempt, task.incarnation))
        self._begun.discard((task.attempt, task.incarnation))
