"""Writes a run in the Trace Event Format, which Perfetto and Chrome's tracing page open.

Every worker is a process with threads for sub-epochs, evaluations and hops, several where it holds
several tasks at once, and two for each device of its shard queues; arrows lead from the sub-epoch
that made a state to the hop that brought it elsewhere; counters add up the bytes, and show the
memory that devices used. Times are whole microseconds since the run's first record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from cerebro_hydra.documents import consistent
from cerebro_hydra.errors import JournalError
from cerebro_hydra.observe.timeline import DeviceLane, HopBar, TaskBar, Timeline, read_run
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.plan.device_work import Span
from cerebro_hydra.storage.run_folder import RunFolder

RUN, FIRST_WORKER = 1, 2
"""Process numbers of the run as a whole, and of worker 0."""

THREADS = {"train": 1, "evaluate": 2}
HOPS = 3
"""Thread of the first lane of hops; hops that overlap have further lanes."""
DEVICES = 500
"""Thread of the transfers between DRAM and disk; two follow for each device."""
_LANE = 1000
"""Threads between two lanes of tasks that a worker holds at once."""


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
                self._sub_epochs[bar.task.trial, bar.task.visit].append(bar)

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
                "visit": task.visit,
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
            for each in self._sub_epochs[bar.task.trial, bar.task.source.visit]
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
