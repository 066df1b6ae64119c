"""The trace keeps the rules of its format, on random runs and on a real one."""

from __future__ import annotations

import copy
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.observe import Decision
from cerebro_hydra.observe.timeline import Timeline, trace
from cerebro_hydra.plan.messages import events as ev
from cerebro_hydra.plan.messages import instructions as ins
from cerebro_hydra.plan.simulate.run import WorkerCrash
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune import SearchResult
from tests.observe.conftest import CRASHES, added, begin, written


def faults(content: dict[str, Any]) -> list[str]:
    """Where a trace breaks the Trace Event Format, in words."""
    found: list[str] = []
    events = [event for event in content["traceEvents"] if event["ph"] != "M"]
    named = {(e["name"], e["pid"], e["tid"]) for e in content["traceEvents"] if e["ph"] == "M"}
    if any(a["ts"] > b["ts"] for a, b in pairwise(events)):
        found.append("times run backwards")
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    slices = defaultdict(list)
    for event in events:
        place = event["pid"], event["tid"]
        if type(event["ts"]) is not int or event["ts"] < 0:
            found.append(f"ts {event['ts']}")
        if ("process_name", event["pid"], 0) not in named:
            found.append(f"process {event['pid']} has no name")
        if event["ph"] == "X":
            if ("thread_name", *place) not in named:
                found.append(f"thread {place} has no name")
            end = event["ts"] + event["dur"]
            stack = open_until[place]
            while stack and stack[-1] <= event["ts"]:
                stack.pop()
            if event["dur"] < 0 or (stack and end > stack[-1]):
                found.append(f"{event['name']} does not nest")
            stack.append(end)
            slices[place].append((event["ts"], end))
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
            at = event["ts"]
            if not any(a <= at <= b for a, b in slices[event["pid"], event["tid"]]):
                found.append(f"flow {event['id']} hangs in the air")
    for number, ends in flows.items():
        if [end["ph"] for end in ends] != ["s", "f"]:
            found.append(f"flow {number} is {[end['ph'] for end in ends]}")
    return found


@pytest.mark.slow
def test_a_real_run_is_a_sound_trace(folder: RunFolder, result: SearchResult) -> None:
    content = trace(folder)
    assert faults(content) == []
    events = content["traceEvents"]
    hops = [e for e in events if e["ph"] == "X" and e["cat"] == "hop"]
    assert 0 < sum(e["ph"] == "f" for e in events) <= len(hops)
    last = [e for e in events if e["ph"] == "C"][-1]
    totals = result.totals
    assert last["args"] == {"moved": totals.bytes_moved, "saved": totals.bytes_saved}
    assert [e["name"] for e in events if e["ph"] == "i"] == ["worker lost"]


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["times", "names", "nests", "flow"])
def test_the_check_itself_can_fail(folder: RunFolder, harm: str) -> None:
    content = copy.deepcopy(trace(folder))
    events = content["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    if harm == "times":
        events.append(timed[0])
    elif harm == "names":
        content["traceEvents"] = [event for event in events if event["ph"] != "M"]
    elif harm == "nests":
        lane = [e for e in timed if (e["pid"], e["tid"]) == (2, 1)]
        lane[0]["dur"] = lane[1]["ts"] + lane[1]["dur"] // 2 - lane[0]["ts"]
    else:
        events.remove(next(event for event in events if event["ph"] == "s"))
    assert faults(content)


@pytest.mark.parametrize("losses", [(), CRASHES])
def test_bars_are_the_decisions_and_never_overlap(
    simulate: Any, losses: tuple[WorkerCrash, ...]
) -> None:
    simulation, records = simulate(4, losses)
    timeline = Timeline()
    for record in records:
        timeline.apply(record)
    assert timeline.finished
    assert len(timeline.absences) == len(losses)
    assert all(absence.end is not None for absence in timeline.absences[:-1])
    counted = [bar for bar in timeline.tasks if (bar.kind, bar.outcome) == ("train", "done")]
    for trial, log in enumerate(simulation.timeline.visit_logs):
        mine = sorted(
            (bar.task.state, bar.task.epoch, *bar.task.partitions)
            for bar in counted
            if bar.task.trial == trial
        )
        assert [(epoch, partition) for _, epoch, partition in mine] == log
    assert ("lost" in {bar.outcome for bar in timeline.tasks}) == bool(losses)
    assert ("repeated" in {bar.outcome for bar in timeline.tasks}) == bool(losses)
    for worker in timeline.workers:
        bars = [bar for bar in timeline.tasks if bar.task.worker == worker]
        assert all(a.end <= b.assigned <= b.start <= b.end for a, b in pairwise(bars))
        hops = [bar.hop for bar in bars if bar.hop is not None]
        for lane in {hop.lane for hop in hops}:
            spans = sorted((hop.start, hop.end) for hop in hops if hop.lane == lane)
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


FIRST, NO_HOP = ins.StateSource(0, None), ev.Hop(0, 0, 0.0)


def told(*records: tuple[float, Any, tuple[Any, ...]]) -> Timeline:
    """The bars of decisions at these times."""
    timeline = Timeline()
    for seq, (time, event, instructions) in enumerate(records):
        timeline.apply(Decision(seq, time, event, instructions))
    timeline.lay_out()
    return timeline


def start(attempt: int, source: ins.StateSource = FIRST) -> ins.StartSubEpoch:
    return ins.StartSubEpoch(attempt, attempt, 1, 0, (0,), 0, "a", source, {})


def done(attempt: int, seconds: float, hop: ev.Hop = NO_HOP) -> ev.SubEpochDone:
    return ev.SubEpochDone(attempt, "a", 4, 1.0, (), 9, seconds, hop)


@pytest.mark.parametrize("residents", [1, 2, 3])
def test_tasks_that_a_worker_holds_at_once_have_lanes_of_their_own(residents: int) -> None:
    timeline = told(
        (1.0, ev.WorkerJoined(0, "a", (0,), 1, residents), (start(0), start(1))),
        (5.0, done(0, 4.0), (start(2),)),
        (6.0, done(1, 4.5), (start(3),)),
        (9.0, done(2, 3.0), ()),
    )
    for lane in {bar.lane for bar in timeline.tasks}:
        spans = sorted((bar.start, bar.end) for bar in timeline.tasks if bar.lane == lane)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert len({bar.lane for bar in timeline.tasks}) == min(residents, 2)
    assert timeline.tasks[3].outcome == "running"
    assert timeline.tasks[3].end == 8.0


def test_a_start_up_is_no_wait_for_shards() -> None:
    """A model is built and a state is fetched before a task computes; only one is waited for."""
    hop = ev.Hop(1_000, 0, 0.5)
    timeline = told(
        (0.0, ev.WorkerJoined(0, "a", (0,)), (start(0, ins.StateSource(1, "b")),)),
        (3.0, ev.StateReceived(0, 1, "a"), ()),
        (10.0, done(0, 2.0, hop), (start(1),)),
        (14.0, done(1, 2.0), ()),
    )
    moved, kept = timeline.tasks
    assert (moved.assigned, moved.wait, moved.start) == (0.0, (2.5, 3.0), 8.0)
    assert kept.wait == (12.0, 12.0)


def test_the_trace_has_a_thread_per_lane(tmp_path: Path) -> None:
    started, *admitted = begin(2)
    decisions: list[tuple[Any, tuple[Any, ...]]] = [(added(each), ()) for each in admitted]
    decisions.append((ev.WorkerJoined(0, "a", (0, 1), 2, 2), (start(0), start(1))))
    decisions += [(done(0, 1.0), ()), (done(1, 2.0), ())]
    told = [Decision(n, float(n), *each) for n, each in enumerate(decisions)]
    folder = written(tmp_path, [started, *admitted], told)
    content = trace(folder)
    assert faults(content) == []
    slices = [each for each in content["traceEvents"] if each["ph"] == "X"]
    assert len({each["tid"] for each in slices}) == 2
