"""Folds the decisions of a run into bars that show who did what when, one lane per worker.

A task's bar ends at the time in the journal, and begins as many seconds before as the agent
measured. A hop's bar ends when its receiver has the whole state; since training begins with the
first shard, it may overlap the task that it belongs to. An agent has one task at a time, so tasks
never overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cerebro_hydra.observe.records import Decision, Record
from cerebro_hydra.plan import events, instructions

AttemptOutcome = Literal["running", "done", "repeated", "failed", "cancelled", "lost"]

_Task = instructions.StartSubEpoch | instructions.Evaluate


@dataclass
class HopBar:
    """One transfer of a state to a worker; `source` is None for a load from the store.

    `start` and `end` are seconds since 1970; `lane` counts from 0 within the worker, so that bars
    of one lane never overlap.
    """

    source: int | None
    start: float
    end: float
    bytes_moved: int
    bytes_saved: int
    lane: int = 0


@dataclass
class TaskBar:
    """One sub-epoch or one evaluation of a partition, on one worker.

    `start` and `end` are seconds since 1970, `seconds` what the agent measured. The agent was given
    the task at `assigned`, and waited for shards from then to `start`. The outcome "repeated" is
    that of a sub-epoch that counted until its state was lost.
    """

    kind: Literal["train", "evaluate"]
    worker: int
    trial: int
    epoch: int
    partition: int
    visit: int
    attempt: int
    assigned: float
    start: float
    end: float
    outcome: AttemptOutcome = "running"
    seconds: float = 0.0
    loss: float | None = None
    hop: HopBar | None = None


@dataclass
class Absence:
    """The time between the loss of a worker's agent and the next one's start, if one came."""

    worker: int
    start: float
    end: float | None
    reason: str


@dataclass
class Timeline:
    """The bars of a run after the records that were applied."""

    begin: float = 0.0
    end: float = 0.0
    finished: bool = False
    """Whether every trial came to an end."""
    tasks: list[TaskBar] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    workers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The partitions of every worker that ever joined."""
    _open: dict[int, tuple[TaskBar, _Task]] = field(default_factory=dict)
    _live: dict[str, int] = field(default_factory=dict)
    _known: dict[str, int] = field(default_factory=dict)
    _requested: dict[tuple[int, int, str], float] = field(default_factory=dict)
    _received: dict[tuple[int, int, str], float] = field(default_factory=dict)
    _lanes: dict[int, list[float]] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Take in one record; only decisions change anything."""
        if not isinstance(record, Decision):
            return
        now = record.time
        self.begin = self.begin or now
        # Clocks may be set back; bars never run backwards.
        self.end = now = max(now, self.end)
        self._event(record.event, now)
        for instruction in record.instructions:
            self._instruction(instruction, now)
        for bar, _ in self._open.values():
            bar.end = now

    def _event(self, event: events.Event, now: float) -> None:
        match event:
            case events.WorkerJoined():
                self._join(event, now)
            case events.WorkerLost():
                self._lose(event.incarnation, event.reason, now)
            case events.StateReceived():
                self._received[event.trial, event.visit, event.incarnation] = now
            case events.SubEpochDone():
                if bar := self._done(event, now):
                    bar.loss = event.loss_sum / event.rows if event.rows else None
            case events.EvaluationDone():
                self._done(event, now)
            case events.TaskFailed() | events.TransferFailed():
                self._close(event.attempt, "failed", now)

    def _instruction(self, instruction: instructions.Instruction, now: float) -> None:
        match instruction:
            case instructions.FetchShards():
                source = instruction.source
                self._requested[instruction.trial, source.visit, instruction.incarnation] = now
            case instructions.StartSubEpoch() | instructions.Evaluate():
                self._begin(instruction, now)
            case instructions.Cancel():
                self._close(instruction.attempt, "cancelled", now)
            case instructions.Redo():
                for bar in self.tasks:
                    mine = bar.kind == "train" and bar.trial == instruction.trial
                    if mine and bar.outcome == "done" and bar.visit in instruction.visits:
                        bar.outcome = "repeated"
            case instructions.FinishRun():
                self.finished = True

    def _begin(self, task: _Task, now: float) -> None:
        bar = TaskBar(
            "train" if isinstance(task, instructions.StartSubEpoch) else "evaluate",
            task.worker,
            task.trial,
            task.epoch,
            task.partition,
            task.visit,
            task.attempt,
            now,
            now,
            now,
        )
        self.tasks.append(bar)
        self._open[task.attempt] = bar, task

    def _done(
        self, event: events.SubEpochDone | events.EvaluationDone, now: float
    ) -> TaskBar | None:
        if event.attempt not in self._open:
            return None
        bar, task = self._open[event.attempt]
        self._close(event.attempt, "done", now)
        bar.seconds = event.seconds
        bar.start = max(bar.assigned, now - event.seconds)
        if (
            event.hop.bytes_moved or event.hop.bytes_saved
        ) and task.source.incarnation != task.incarnation:
            bar.hop = self._hop(bar, task, event.hop)
        return bar

    def _hop(self, bar: TaskBar, task: _Task, hop: events.Hop) -> HopBar:
        state = task.trial, task.source.visit, task.incarnation
        end = min(self._received.get(state, bar.start), bar.end)
        requested = min(self._requested.get(state, bar.assigned), bar.assigned)
        start = min(max(end - hop.seconds, requested), end)
        source = None
        if task.source.incarnation is not None:
            source = self._known.get(task.source.incarnation)
        lanes = self._lanes.setdefault(task.worker, [])
        lane = next((n for n, busy in enumerate(lanes) if busy <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        return HopBar(source, start, end, hop.bytes_moved, hop.bytes_saved, lane)

    def _close(self, attempt: int, outcome: AttemptOutcome, now: float) -> None:
        """End a task's bar, unless it is over already."""
        if attempt in self._open:
            bar, _ = self._open.pop(attempt)
            bar.outcome, bar.end = outcome, now

    def _join(self, event: events.WorkerJoined, now: float) -> None:
        for incarnation, worker in list(self._live.items()):
            if worker == event.worker and incarnation != event.incarnation:
                self._lose(incarnation, "another agent took its place", now)
        for absence in self.absences:
            if absence.worker == event.worker and absence.end is None:
                absence.end = now
        self._live[event.incarnation] = self._known[event.incarnation] = event.worker
        self.workers[event.worker] = event.partitions

    def _lose(self, incarnation: str, reason: str, now: float) -> None:
        worker = self._live.pop(incarnation, None)
        if worker is None:
            return
        self.absences.append(Absence(worker, now, None, reason))
        for attempt, (_, task) in list(self._open.items()):
            if task.incarnation == incarnation:
                self._close(attempt, "lost", now)
