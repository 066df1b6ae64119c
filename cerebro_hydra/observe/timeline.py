"""Folds the decisions of a run into bars that show who did what when, in lanes of the workers.

A task's bar ends at the time in the journal, and begins as many seconds before as the agent
measured. A hop's bar ends when its receiver has the whole state; since training begins with the
first shard, it may overlap the task that it belongs to. A worker has a lane for each task that it
may hold at once, so the bars of a lane never overlap. All times are seconds since the run's first
decision.

`trace` writes them in the Trace Event Format, which Perfetto and Chrome's tracing page open.

Every worker is a process with threads for sub-epochs, evaluations and hops, several where it holds
several tasks at once, and two for each device of its shard queues; arrows lead from the sub-epoch
that made a state to the hop that brought it elsewhere; counters add up the bytes, and show the
memory that devices used. Times are whole microseconds since the run's first record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cerebro_hydra.documents import consistent
from cerebro_hydra.errors import JournalError
from cerebro_hydra.observe.records import Decision, Record, RunEnded, records_of
from cerebro_hydra.observe.view import DeviceTotals, RunView, Task
from cerebro_hydra.plan.messages import events, instructions
from cerebro_hydra.plan.messages.device_work import DeviceWork, Span, add_span
from cerebro_hydra.storage.run_folder import RunFolder

_MOST_SPANS = 1000
"""Spans of tasks, and as many of transfers, that a device's lane has at most."""

AttemptOutcome = Literal["running", "done", "repeated", "failed", "cancelled", "lost"]

RUN, FIRST_WORKER = 1, 2
"""Process numbers of the run as a whole, and of worker 0."""

THREADS = {"train": 1, "evaluate": 2}
HOPS = 3
"""Thread of the first lane of hops; hops that overlap have further lanes."""

DEVICES = 500
"""Thread of the transfers between DRAM and disk; two follow for each device."""

_LANE = 1000
"""Threads between two lanes of tasks that a worker holds at once."""


@dataclass
class HopBar:
    """One transfer of a state to a worker; `source` is None for a load from the store.

    `lane` counts from 0 within the worker, so that bars of one lane never overlap.
    """

    source: int | None
    start: float
    end: float
    bytes_moved: int
    bytes_saved: int
    lane: int = 0


@dataclass
class TaskBar:
    """Shows one sub-epoch or one evaluation of a partition, on one worker.

    The agent was given the task at `assigned` and began to compute at `start`; `seconds` is what it
    measured, and `work_seconds` how long devices computed for it. `lane` counts from 0 within the
    worker. The outcome "repeated" is that of a sub-epoch that counted until
    its state was lost.
    """

    task: Task
    assigned: float
    start: float
    end: float
    outcome: AttemptOutcome = "running"
    seconds: float = 0.0
    work_seconds: float = 0.0
    loss: float | None = None
    hop: HopBar | None = None
    lane: int = 0

    @property
    def kind(self) -> Literal["train", "evaluate"]:
        """Return what the agent does in it."""
        return "train" if isinstance(self.task, instructions.StartSubEpoch) else "evaluate"

    @property
    def wait(self) -> tuple[float, float]:
        """Return from when to when it waited for shards; before `start` it may also make ready.

        An agent that has a trial for the first time builds its model, for example.
        """
        if self.hop is None:
            return self.start, self.start
        begin = max(self.assigned, self.hop.start)
        return begin, max(begin, min(self.start, self.hop.end))


@dataclass
class Absence:
    """The time between the loss of a worker's agent and the next one's start, if one came."""

    worker: int
    start: float
    end: float | None
    reason: str


@dataclass
class DeviceLane:
    """Shows what a device of a worker with shard queues did, or what moved between DRAM and disk.

    A span says how many seconds of it were worked for each trial; where the reports of a long run
    are many, their spans are joined. `told` has the totals after each report, with its end, and
    with the most bytes that were in use since the report before.
    """

    totals: DeviceTotals
    tasks: list[Span] = field(default_factory=list)
    moves: list[Span] = field(default_factory=list)
    told: list[tuple[float, DeviceTotals]] = field(default_factory=list)

    def add(self, work: DeviceWork, seconds: float, now: float) -> None:
        """Add what it did in the seconds until now."""
        self.totals.add(work)
        self.told.append((now, replace(self.totals, peak=work.peak)))
        for lane, spans in ((self.tasks, work.tasks), (self.moves, work.moves)):
            for *ends, did in spans:
                begin, end = (min(max(now - seconds + each, 0.0), now) for each in ends)
                add_span(lane, (begin, end, did), _MOST_SPANS)


@dataclass
class Timeline:
    """The bars of a run after the records that were applied."""

    begin: float | None = None
    """When the first decision was taken, in seconds since 1970."""
    end: float = 0.0
    finished: bool = False
    """Whether every trial came to an end."""
    tasks: list[TaskBar] = field(default_factory=list)
    absences: list[Absence] = field(default_factory=list)
    workers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The partitions of every worker that ever joined."""
    devices: dict[int, int] = field(default_factory=dict)
    """How many devices each of them has."""
    residents: dict[int, int] = field(default_factory=dict)
    """How many tasks each of them may hold at once."""
    lanes: dict[tuple[int, int], DeviceLane] = field(default_factory=dict)
    """What devices of workers with shard queues did, by worker and number."""
    _open: dict[tuple[int, str], TaskBar] = field(default_factory=dict)
    _live: dict[int, str] = field(default_factory=dict)
    _known: dict[str, int] = field(default_factory=dict)
    _requested: dict[tuple[int, int, str], float] = field(default_factory=dict)
    _received: dict[tuple[int, int, str], float] = field(default_factory=dict)
    _lanes: dict[int, list[float]] = field(default_factory=dict)

    @property
    def first_task(self) -> float:
        """Return when a worker was given the first task; before, workers start."""
        return min((bar.assigned for bar in self.tasks), default=0.0)

    def apply(self, record: Record) -> None:
        """Take in one record; only decisions change anything."""
        if not isinstance(record, Decision):
            return
        if self.begin is None:
            self.begin = record.time
        # Clocks may be set back; bars never run backwards.
        self.end = now = max(record.time - self.begin, self.end)
        self._event(record.event, now)
        for instruction in record.instructions:
            self._instruction(instruction, now)
        for bar in self._open.values():
            bar.end = now

    def _event(self, event: events.Event, now: float) -> None:
        match event:
            case events.WorkerJoined():
                self._join(event, now)
            case events.WorkerLost():
                self._lose(event.incarnation, event.reason, now)
            case events.RunResumed():
                for incarnation in list(self._live.values()):
                    self._lose(incarnation, "the run was resumed", now)
            case events.SearchReopened():
                self.finished = False
            case events.StateReceived():
                self._received[event.trial, event.state, event.incarnation] = now
            case events.SubEpochDone():
                if bar := self._done(event, now):
                    bar.loss = event.loss_sum / event.rows
            case events.EvaluationDone():
                self._done(event, now)
            case events.DevicesWorked():
                self._work(event, now)
            case events.TaskFailed() | events.TransferFailed():
                self._close(event.attempt, event.incarnation, "failed", now)

    def _instruction(self, instruction: instructions.Instruction, now: float) -> None:
        match instruction:
            case instructions.FetchShards():
                source = instruction.source
                self._requested[instruction.trial, source.state, instruction.incarnation] = now
            case instructions.StartSubEpoch() | instructions.Evaluate():
                bar = TaskBar(instruction, assigned=now, start=now, end=now)
                self.tasks.append(bar)
                self._open[instruction.attempt, instruction.incarnation] = bar
            case instructions.Cancel():
                self._close(instruction.attempt, instruction.incarnation, "cancelled", now)
            case instructions.Redo():
                for bar in self.tasks:
                    trained = bar.kind == "train" and bar.outcome == "done"
                    void = bar.task.state in instruction.visits
                    if trained and void and bar.task.trial == instruction.trial:
                        bar.outcome = "repeated"
            case instructions.FinishRun():
                self.finished = True

    def _done(
        self, event: events.SubEpochDone | events.EvaluationDone, now: float
    ) -> TaskBar | None:
        bar = self._close(event.attempt, event.incarnation, "done", now)
        if bar is not None:
            bar.seconds, bar.work_seconds = event.seconds, event.work_seconds
            bar.start = max(bar.assigned, now - event.seconds)
            moves = bar.task.source.incarnation != bar.task.incarnation
            if moves and (event.hop.bytes_moved or event.hop.bytes_saved):
                bar.hop = self._hop(bar, event.hop)
        return bar

    def _work(self, event: events.DevicesWorked, now: float) -> None:
        for worker, incarnation in self._live.items():
            for work in event.devices if incarnation == event.incarnation else ():
                key = worker, work.device
                lane = self.lanes.setdefault(key, DeviceLane(DeviceTotals(*key)))
                lane.add(work, event.seconds, now)

    def _hop(self, bar: TaskBar, hop: events.Hop) -> HopBar:
        task = bar.task
        state = task.trial, task.source.state, task.incarnation
        end = min(self._received.get(state, bar.start), bar.end)
        requested = min(self._requested.get(state, bar.assigned), bar.assigned)
        start = min(max(end - hop.seconds, requested), end)
        source = self._known.get(task.source.incarnation or "")
        lanes = self._lanes.setdefault(task.worker, [])
        lane = next((n for n, busy in enumerate(lanes) if busy <= start), len(lanes))
        lanes[lane : lane + 1] = [end]
        return HopBar(source, start, end, hop.bytes_moved, hop.bytes_saved, lane)

    def _close(
        self, attempt: int, incarnation: str, outcome: AttemptOutcome, now: float
    ) -> TaskBar | None:
        """End a task's bar and return it, unless it is over already."""
        bar = self._open.pop((attempt, incarnation), None)
        if bar is not None:
            bar.outcome, bar.end = outcome, now
        return bar

    def _join(self, event: events.WorkerJoined, now: float) -> None:
        before = self._live.get(event.worker, event.incarnation)
        if before != event.incarnation:
            self._lose(before, "another agent took its place", now)
        for absence in self.absences:
            if absence.worker == event.worker and absence.end is None:
                absence.end = now
        self._live[event.worker] = event.incarnation
        self._known[event.incarnation] = event.worker
        self.workers[event.worker] = event.partitions
        self.devices[event.worker] = event.devices
        self.residents[event.worker] = max(event.residents, self.residents.get(event.worker, 1))

    def lay_out(self) -> None:
        """Put the bars of each worker into lanes; an open one begins when its lane is free.

        An agent is given its next task before the one before is over.
        """
        ends: dict[int, list[float]] = {worker: [] for worker in self.workers}
        for bar in sorted(self.tasks, key=lambda bar: bar.start):
            lanes = ends[bar.task.worker]
            free = (lane for lane, end in enumerate(lanes) if end <= bar.start)
            lane = next(free, len(lanes))
            if lane == self.residents[bar.task.worker]:
                lane = min(range(lane), key=lanes.__getitem__)
                bar.start = min(lanes[lane], bar.end)
            lanes[lane : lane + 1] = [max(bar.end, *lanes[lane : lane + 1], 0.0)]
            bar.lane = lane

    def _lose(self, incarnation: str, reason: str, now: float) -> None:
        worker = self._known.get(incarnation)
        if worker is None or self._live.get(worker) != incarnation:
            return
        del self._live[worker]
        self.absences.append(Absence(worker, now, None, reason))
        for attempt, agent in list(self._open):
            if agent == incarnation:
                self._close(attempt, agent, "lost", now)


def read_run(folder: RunFolder, running: bool = False) -> tuple[RunView, Timeline]:
    """Fold what a run's folder holds into its state and its bars.

    While the run goes on, `running` says so; otherwise what has no end was interrupted.

    Raises:
        StoreError: there is no run document.
        JournalError: the journal is damaged.
    """
    return fold(records_of(folder), running)


def fold(records: Iterable[Record], running: bool = False) -> tuple[RunView, Timeline]:
    """Fold the records of a run, also of one that was only simulated, into its state and bars."""
    view, timeline = RunView(), Timeline()
    for record in records:
        if not (running and isinstance(record, RunEnded)):
            view.apply(record)
        timeline.apply(record)
    timeline.lay_out()
    return view, timeline


def trace(folder: RunFolder) -> dict[str, Any]:
    """Return the trace of a run, ready for `json`, with events in the order of their times.

    Raises:
        StoreError: there is no run document.
        JournalError: the journal is damaged.
    """
    with consistent(f"the journal of run {folder.path!r}", JournalError):
        view, timeline = read_run(folder)
        made = _Trace(view, timeline)
        timed = sorted(made.events(), key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": [*made.names(), *timed],
        "displayTimeUnit": "ms",
        "otherData": {"run_id": view.document.run_id},
    }


class _Trace:
    def __init__(self, view: RunView, timeline: Timeline) -> None:
        self._ids = {number: trial.trial_id for number, trial in view.trials.items()}
        self._timeline = timeline
        self._sub_epochs = defaultdict[tuple[int, int], list[TaskBar]](list)
        for bar in timeline.tasks:
            if bar.kind == "train":
                self._sub_epochs[bar.task.trial, bar.task.state].append(bar)

    def names(self) -> Iterator[dict[str, Any]]:
        yield _event("M", "process_name", RUN, 0, args={"name": "run"})
        for worker, partitions in sorted(self._timeline.workers.items()):
            pid = FIRST_WORKER + worker
            name = f"worker {worker} (partitions {', '.join(map(str, partitions))})"
            yield _event("M", "process_name", pid, 0, args={"name": name})
            yield _event("M", "process_sort_index", pid, 0, args={"sort_index": pid})
            bars = [bar for bar in self._timeline.tasks if bar.task.worker == worker]
            threads = {THREADS["train"]: "sub-epochs", THREADS["evaluate"]: "evaluations"}
            words = {"train": "sub-epochs", "evaluate": "evaluations"}
            threads |= {_thread(bar): f"{words[bar.kind]} {bar.lane}" for bar in bars if bar.lane}
            for lane in sorted({bar.hop.lane for bar in bars if bar.hop}):
                threads[HOPS + lane] = f"hops {lane}" if lane else "hops"
            for device in self._lanes_of(worker):
                threads[_device(device, moves=True)] = f"{device.totals.name} transfers"
                if not device.totals.is_dram:
                    threads[_device(device)] = device.totals.name
            for tid, name in threads.items():
                yield _event("M", "thread_name", pid, tid, args={"name": name})
                yield _event("M", "thread_sort_index", pid, tid, args={"sort_index": tid})

    def events(self) -> Iterator[dict[str, Any]]:
        for bar in self._timeline.tasks:
            yield self._task(bar)
            if bar.hop is not None:
                yield from self._hop(bar, bar.hop)
        for absence in self._timeline.absences:
            pid, args = FIRST_WORKER + absence.worker, {"reason": absence.reason}
            ts = _microseconds(absence.start)
            yield _event("i", "worker lost", pid, THREADS["train"], s="p", ts=ts, args=args)
        yield from self._bytes()
        for lane in self._timeline.lanes.values():
            yield from self._spans(lane, lane.tasks, _device(lane), "device")
            yield from self._spans(lane, lane.moves, _device(lane, moves=True), "transfer")
            yield from self._told(lane)

    def _lanes_of(self, worker: int) -> list[DeviceLane]:
        return [each for each in self._timeline.lanes.values() if each.totals.worker == worker]

    def _spans(
        self, lane: DeviceLane, spans: Sequence[Span], tid: int, cat: str
    ) -> Iterator[dict[str, Any]]:
        pid = FIRST_WORKER + lane.totals.worker
        for begin, end, work in spans:
            seconds = {self._ids[trial]: each for trial, each in work}
            ts, name = _microseconds(begin), ", ".join(seconds)
            span = {"ts": ts, "dur": _microseconds(end) - ts}
            yield _event("X", name, pid, tid, cat=cat, **span, args={"seconds": seconds})

    def _told(self, lane: DeviceLane) -> Iterator[dict[str, Any]]:
        """Yield what was moved so far, and what was in use of the budget, at each report."""
        pid, budget = FIRST_WORKER + lane.totals.worker, lane.totals.budget
        limit = {} if budget is None else {"budget": budget}
        for moment, totals in lane.told:
            for name, args in {
                "bytes moved": {"promoted": totals.promoted, "spilled": totals.spilled},
                "peak bytes": {"in use": totals.peak, **limit},
            }.items():
                title = f"{name} of {totals.name}"
                yield _event("C", title, pid, 0, ts=_microseconds(moment), args=args)

    def _task(self, bar: TaskBar) -> dict[str, Any]:
        task, trial_id = bar.task, self._ids[bar.task.trial]
        return _event(
            "X",
            f"{trial_id} epoch {task.epoch + 1} partition {task.partition}",
            FIRST_WORKER + task.worker,
            _thread(bar),
            cat="sub-epoch" if bar.kind == "train" else "evaluation",
            **_span(bar),
            args={
                "trial": trial_id,
                "epoch": task.epoch + 1,
                "partition": task.partition,
                "state": task.state,
                "attempt": task.attempt,
                "outcome": bar.outcome,
                "waited_seconds": bar.wait[1] - bar.wait[0],
                "ready_seconds": bar.start - bar.assigned - (bar.wait[1] - bar.wait[0]),
            },
        )

    def _hop(self, bar: TaskBar, hop: HopBar) -> Iterator[dict[str, Any]]:
        pid, tid = FIRST_WORKER + bar.task.worker, HOPS + hop.lane
        cat, source = "hop", f"worker {hop.source}"
        if hop.source is None:
            cat, source = "load", "the store"
        span = _span(hop)
        name = f"{self._ids[bar.task.trial]} from {source}"
        args = {"bytes_moved": hop.bytes_moved, "bytes_saved": hop.bytes_saved}
        yield _event("X", name, pid, tid, cat=cat, **span, args=args)
        maker = self._maker(bar, hop)
        if maker is not None:
            made, end = _span(maker), span["ts"] + span["dur"]
            # An arrow starts inside the slice that it leaves, and never after it arrives.
            begin = max(made["ts"], min(made["ts"] + made["dur"], end))
            flow = {"cat": "hop", "id": bar.task.attempt}
            maker_pid = FIRST_WORKER + maker.task.worker
            yield _event("s", "hop", maker_pid, _thread(maker), ts=begin, **flow)
            yield _event("f", "hop", pid, tid, bp="e", ts=end, **flow)

    def _maker(self, bar: TaskBar, hop: HopBar) -> TaskBar | None:
        """Return the sub-epoch whose state the hop moved, if it ran where the hop came from."""
        makers = (
            each
            for each in self._sub_epochs[bar.task.trial, bar.task.source.state]
            if each.task.worker == hop.source
            and _microseconds(each.start) <= _microseconds(hop.end)
        )
        return max(makers, key=lambda each: each.end, default=None)

    def _bytes(self) -> Iterator[dict[str, Any]]:
        hops = [bar.hop for bar in self._timeline.tasks if bar.hop and bar.hop.source is not None]
        moved = saved = 0
        for hop in sorted(hops, key=lambda hop: hop.end):
            moved, saved = moved + hop.bytes_moved, saved + hop.bytes_saved
            args = {"moved": moved, "saved": saved}
            yield _event("C", "bytes of hops", RUN, 0, ts=_microseconds(hop.end), args=args)


def _event(phase: str, name: str, pid: int, tid: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": pid, "tid": tid, **more}


def _thread(bar: TaskBar) -> int:
    return THREADS[bar.kind] + _LANE * bar.lane


def _device(lane: DeviceLane, moves: bool = False) -> int:
    return DEVICES + 2 * (lane.totals.device + 1) - (not moves)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _span(bar: TaskBar | HopBar) -> dict[str, int]:
    begin, end = _microseconds(bar.start), _microseconds(bar.end)
    return {"ts": begin, "dur": end - begin}
