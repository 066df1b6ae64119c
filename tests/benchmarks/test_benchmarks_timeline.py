"""A timeline that is made anew in part is the one that a whole simulation makes, for any change."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement.timeline import TaskTimeline, TimedTask, simulated
from tests.examples import examples

LANES = 4


@st.composite
def tasks(draw: st.DrawFn, number: int) -> TimedTask:
    """Draw a task that comes after some with lower numbers."""
    before = (
        st.lists(st.integers(0, number - 1), max_size=3, unique=True) if number else st.just([])
    )
    return TimedTask(
        draw(st.integers(0, LANES - 1)),
        draw(st.sampled_from([1.0, 2.0, 5.0, 0.3])),
        tuple(draw(before)),
    )


@st.composite
def graphs(draw: st.DrawFn) -> dict[int, TimedTask]:
    return {number: draw(tasks(number)) for number in range(draw(st.integers(1, 24)))}


@st.composite
def changes(draw: st.DrawFn, graph: dict[int, TimedTask]) -> dict[int, TimedTask | None]:
    """Draw other tasks, new ones, and some that go with all that come after them."""
    changed: dict[int, TimedTask | None] = {}
    for number in draw(st.lists(st.sampled_from(sorted(graph)), max_size=4, unique=True)):
        changed[number] = draw(tasks(number)) if draw(st.booleans()) else None
    new = range(max(graph) + 1, max(graph) + 1 + draw(st.integers(0, 3)))
    changed |= {number: draw(tasks(number)) for number in new}
    for number in sorted({*graph, *new}):
        task = changed[number] if number in changed else graph[number]
        gone = {n for n in range(number) if n not in graph or (n in changed and changed[n] is None)}
        if task is not None and gone & {*task.after}:
            changed[number] = None
    return changed


@settings(max_examples=examples(240), deadline=None)
@given(st.data())
def test_a_changed_timeline_is_the_whole_one(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    timeline = TaskTimeline(graph)
    for _ in range(data.draw(st.integers(1, 4))):
        if not graph:
            return
        changed = data.draw(changes(graph))
        before = dict(timeline.tasks), dict(timeline.times), timeline.makespan
        timeline.change(changed)
        after = {n: task for n, task in {**graph, **changed}.items() if task is not None}
        assert timeline.tasks == after
        assert timeline.times == simulated(after), "in every bit"
        assert timeline.makespan == max((t.end for t in timeline.times.values()), default=0.0)
        if data.draw(st.booleans()):
            timeline.undo()
            assert (timeline.tasks, timeline.times, timeline.makespan) == before
        else:
            graph = after


def test_a_change_looks_at_what_it_touches_alone() -> None:
    """Eight lanes have chains of their own; a task at the end of one of them gets longer."""
    chains = {
        lane * 100 + n: TimedTask(lane, 1.0, (lane * 100 + n - 1,) if n else ())
        for lane in range(8)
        for n in range(50)
    }
    timeline = TaskTimeline(chains)
    timeline.change({345: TimedTask(3, 2.0, (344,))})
    assert timeline.looked_at == 50, "those of one lane"
    assert timeline.makespan == 51.0


def test_a_task_that_is_new_on_a_lane_delays_what_follows_it_there() -> None:
    """Its own times are those that it had elsewhere, so nothing but its place has changed."""
    timeline = TaskTimeline({0: TimedTask(0, 2.0), 1: TimedTask(1, 3.0)})
    timeline.change({0: TimedTask(1, 2.0)})
    assert timeline.times[1].begin == 2.0


def test_a_task_that_changes_its_lane_still_delays_those_behind_it() -> None:
    timeline = TaskTimeline({0: TimedTask(0, 1.0), 1: TimedTask(0, 1.0, (0,))})
    timeline.change({0: TimedTask(1, 1.0)})
    timeline.change({0: TimedTask(1, 4.0)})
    assert timeline.times[1].begin == 4.0


def test_tasks_are_refused_that_take_no_time_or_wait_for_ever() -> None:
    with pytest.raises(ValueError, match=r"takes 0\.0 seconds"):
        TimedTask(0, 0.0)
    circle = {0: TimedTask(0, 1.0, (1,)), 1: TimedTask(0, 1.0, (0,)), 2: TimedTask(0, 1.0)}
    with pytest.raises(ValueError, match=r"tasks \[0, 1\] wait for ever"):
        simulated(circle)
