"""Writes a run in the Trace Event Format, which Perfetto and Chrome's tracing page open.

Every worker is a process with threads for sub-epochs, evaluations and hops; arrows lead from the
sub-epoch that made a state to the hop that brought it elsewhere; counters add up the bytes. Times
are whole microseconds since the run's first record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from cerebro_hydra.observe.stream import records_of
from cerebro_hydra.observe.timeline import HopBar, TaskBar, Timeline
from cerebro_hydra.observe.view import RunView
from cerebro_hydra.storage.run_folder import RunFolder

RUN, FIRST_WORKER = 1, 2
"""Process numbers of the run as a whole, and of worker 0."""

THREADS = {"train": 1, "evaluate": 2}
HOPS = 3
"""Thread of the first lane of hops; hops that overlap have further lanes."""


def trace(folder: RunFolder) -> dict[str, Any]:
    """Return the trace of a run, ready for `json`, with events in the order of their times.

    Raises:
        StoreError: there is no run document.
        JournalError: the journal is damaged.
    """
    view, timeline = RunView(), Timeline()
    for record in records_of(folder):
        view.apply(record)
        timeline.apply(record)
    assert view.document is not None
    made = _Trace(view, timeline)
    timed = sorted(made.events(), key=lambda event: (event["ts"], -event.get("dur", 0)))
    return {
        "traceEvents": [*made.names(), *timed],
        "displayTimeUnit": "ms",
        "otherData": {"run_id": view.document.run_id},
    }


class _Trace:
    def __init__(self, view: RunView, timeline: Timeline) -> None:
        self._ids = [trial.trial_id for trial in view.trials]
        self._timeline = timeline
        self._sub_epochs = defaultdict[tuple[int, int], list[TaskBar]](list)
        for bar in timeline.tasks:
            if bar.kind == "train":
                self._sub_epochs[bar.trial, bar.visit].append(bar)

    def names(self) -> Iterator[dict[str, Any]]:
        yield _metadata("process_name", RUN, 0, name="run")
        for worker, partitions in sorted(self._timeline.workers.items()):
            pid = FIRST_WORKER + worker
            held = ", ".join(map(str, partitions))
            yield _metadata("process_name", pid, 0, name=f"worker {worker} (partitions {held})")
            yield _metadata("process_sort_index", pid, 0, sort_index=pid)
            lanes = [
                bar.hop.lane for bar in self._timeline.tasks if bar.worker == worker and bar.hop
            ]
            threads = {"sub-epochs": 1, "evaluations": 2}
            threads |= {
                f"hops {lane}" if lane else "hops": HOPS + lane for lane in sorted({*lanes})
            }
            for name, tid in threads.items():
                yield _metadata("thread_name", pid, tid, name=name)
                yield _metadata("thread_sort_index", pid, tid, sort_index=tid)

    def events(self) -> Iterator[dict[str, Any]]:
        for bar in self._timeline.tasks:
            yield self._task(bar)
            if bar.hop is not None:
                yield from self._hop(bar, bar.hop)
        for absence in self._timeline.absences:
            yield {
                "name": "worker lost",
                "ph": "i",
                "s": "p",
                "pid": FIRST_WORKER + absence.worker,
                "tid": THREADS["train"],
                "ts": self._time(absence.start),
                "args": {"reason": absence.reason},
            }
        yield from self._bytes()

    def _task(self, bar: TaskBar) -> dict[str, Any]:
        return {
            "name": f"{self._ids[bar.trial]} epoch {bar.epoch + 1} partition {bar.partition}",
            "cat": "sub-epoch" if bar.kind == "train" else "evaluation",
            "ph": "X",
            "pid": FIRST_WORKER + bar.worker,
            "tid": THREADS[bar.kind],
            **self._span(bar.start, bar.end),
            "args": {
                "trial": self._ids[bar.trial],
                "epoch": bar.epoch,
                "partition": bar.partition,
                "visit": bar.visit,
                "attempt": bar.attempt,
                "outcome": bar.outcome,
                "waited_seconds": bar.start - bar.assigned,
            },
        }

    def _hop(self, bar: TaskBar, hop: HopBar) -> Iterator[dict[str, Any]]:
        pid, tid = FIRST_WORKER + bar.worker, HOPS + hop.lane
        source = "the store" if hop.source is None else f"worker {hop.source}"
        span = self._span(hop.start, hop.end)
        yield {
            "name": f"{self._ids[bar.trial]} from {source}",
            "cat": "load" if hop.source is None else "hop",
            "ph": "X",
            "pid": pid,
            "tid": tid,
            **span,
            "args": {"bytes_moved": hop.bytes_moved, "bytes_saved": hop.bytes_saved},
        }
        maker = self._maker(bar, hop)
        if maker is not None:
            made = self._span(maker.start, maker.end)
            flow = {"name": "hop", "cat": "hop", "id": bar.attempt}
            # An arrow starts inside the slice that it leaves, and never after it arrives.
            begin = min(made["ts"] + made["dur"], span["ts"] + span["dur"])
            at = {"pid": FIRST_WORKER + maker.worker, "tid": THREADS["train"]}
            yield {**flow, "ph": "s", **at, "ts": max(made["ts"], begin)}
            yield {
                **flow,
                "ph": "f",
                "bp": "e",
                "pid": pid,
                "tid": tid,
                "ts": span["ts"] + span["dur"],
            }

    def _maker(self, bar: TaskBar, hop: HopBar) -> TaskBar | None:
        """Return the sub-epoch whose state the hop moved, if it ran where the hop came from."""
        visit = bar.visit - 1 if bar.kind == "train" else bar.visit
        end = self._time(hop.end)
        makers = (
            each
            for each in self._sub_epochs[bar.trial, visit]
            if each.worker == hop.source and self._time(each.start) <= end
        )
        return max(makers, key=lambda each: each.end, default=None)

    def _bytes(self) -> Iterator[dict[str, Any]]:
        hops = [bar.hop for bar in self._timeline.tasks if bar.hop and bar.hop.source is not None]
        moved = saved = 0
        for hop in sorted(hops, key=lambda hop: hop.end):
            moved, saved = moved + hop.bytes_moved, saved + hop.bytes_saved
            yield {
                "name": "bytes of hops",
                "ph": "C",
                "pid": RUN,
                "tid": 0,
                "ts": self._time(hop.end),
                "args": {"moved": moved, "saved": saved},
            }

    def _time(self, at: float) -> int:
        return round((at - self._timeline.begin) * 1e6)

    def _span(self, start: float, end: float) -> dict[str, int]:
        begin = max(0, self._time(start))
        return {"ts": begin, "dur": max(0, self._time(end) - begin)}


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
