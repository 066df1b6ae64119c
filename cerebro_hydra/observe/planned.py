"""Shows what a plan expected of a run beside what happened, lane by lane."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cerebro_hydra.documents import Count, decode
from cerebro_hydra.observe.timeline import TaskBar, Timeline
from cerebro_hydra.storage.run_document import PLAN_FILE
from cerebro_hydra.storage.run_folder import RunFolder

MOST_BARS = 2000
"""Of more tasks than this, a plan keeps what they add up to, but not each of them."""

Bar = tuple[Count, str, float, float]
"""A trial, "train" or "evaluate", and the seconds since the first task at which it is done."""


@dataclass(frozen=True)
class WorkerLane:
    """Tells what a worker does of a run, or did.

    Args:
        tasks: its sub-epochs and evaluations.
        work: the seconds that its devices compute for them.
        end: when the last of them ends, in seconds since the run's first task.
        bars: each of them, by the lane of the worker.
    """

    worker: Count
    tasks: Count
    work: float
    end: float
    bars: tuple[tuple[Bar, ...], ...] = ()


@dataclass(frozen=True)
class PlannedRun:
    """Holds what was expected of a run when its last plan was made.

    Args:
        told: what was chosen, a line for trials that are alike.
        seconds: that it takes from its first task on, and `plain_seconds` without a plan.
        lanes: of its workers.
    """

    told: tuple[str, ...]
    seconds: float
    plain_seconds: float
    lanes: tuple[WorkerLane, ...] = ()

    def write(self, folder: RunFolder) -> None:
        """Write it to the run's folder, over an older one."""
        folder.write_json(PLAN_FILE, asdict(self))

    @classmethod
    def read(cls, folder: RunFolder) -> PlannedRun | None:
        """Return what the run's folder has; None where nothing was planned.

        Raises:
            StoreError: the file is damaged.
        """
        if not folder.store.exists(f"{folder.path}/{PLAN_FILE}"):
            return None
        found: PlannedRun = decode(cls, folder.read_json(PLAN_FILE), PLAN_FILE)
        return found


def lanes_of(timeline: Timeline) -> tuple[WorkerLane, ...]:
    """Return what each worker has done of a run, also of one that was only simulated."""
    begin = timeline.first_task
    done = [bar for bar in timeline.tasks if bar.outcome in ("done", "repeated")]
    return tuple(
        _lane(worker, [bar for bar in done if bar.task.worker == worker], begin, len(done))
        for worker in sorted(timeline.workers)
    )


def _lane(worker: int, bars: list[TaskBar], begin: float, most: int) -> WorkerLane:
    lanes = range(1 + max((bar.lane for bar in bars), default=-1))
    shown = bars if most <= MOST_BARS else []
    return WorkerLane(
        worker,
        len(bars),
        sum(bar.work_seconds or bar.seconds for bar in bars),
        max((bar.end for bar in bars), default=begin) - begin,
        tuple(
            tuple(_bar(bar, begin) for bar in shown if bar.lane == lane)
            for lane in (lanes if shown else ())
        ),
    )


def _bar(bar: TaskBar, begin: float) -> Bar:
    return bar.task.trial, bar.kind, bar.start - begin, bar.end - begin


def compared(
    planned: PlannedRun, timeline: Timeline, colours: dict[int, int]
) -> list[dict[str, Any]]:
    """Return a row for each worker: what was planned and what it did, with strips to be drawn.

    Args:
        colours: of trials, by number; -1 is grey.
    """
    real = {lane.worker: lane for lane in lanes_of(timeline)}
    ends = [lane.end for lane in (*planned.lanes, *real.values())]
    longest = max(ends, default=0.0) or 1.0
    return [
        {
            "worker": lane.worker,
            "planned": lane,
            "real": (did := real.get(lane.worker)),
            "strips": [
                *_strips("planned", lane, longest, colours),
                *(_strips("did", did, longest, colours) if did else ()),
            ],
        }
        for lane in planned.lanes
    ]


def _strips(
    name: str, lane: WorkerLane, longest: float, colours: dict[int, int]
) -> Iterable[dict[str, Any]]:
    for bars in lane.bars:
        yield {
            "name": name,
            "bars": [
                {
                    "left": round(100 * begin / longest, 2),
                    "width": max(0.1, round(100 * (end - begin) / longest, 2)),
                    "colour": colours.get(trial, -1),
                    "kind": kind,
                }
                for trial, kind, begin, end in bars
            ],
        }
