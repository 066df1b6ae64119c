"""What a worker tells of its devices: bounded, and nothing is lost of seconds and bytes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.plan.hop.state import HopState
from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind
from cerebro_hydra.plan.messages.config import HopConfig
from cerebro_hydra.plan.messages.device_work import DeviceWork, Span, add_span, coarsened
from cerebro_hydra.plan.messages.events import DevicesWorked
from cerebro_hydra.plan.queues.events import ActionDone, ShardArrived, VisitAdded
from cerebro_hydra.plan.queues.log import MOST_SPANS, DeviceLog
from cerebro_hydra.plan.queues.pick import sharp
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation

times = st.floats(0, 1e4)
works = st.dictionaries(st.integers(0, 3), times, min_size=1).map(lambda work: tuple(work.items()))
spans = st.builds(lambda a, b, work: (min(a, b), max(a, b), work), times, times, works)


def seconds_of(spans: list[Span]) -> dict[int, float]:
    total = Counter[int]()
    for _, _, work in spans:
        for trial, seconds in work:
            total[trial] += seconds  # type: ignore[assignment]
    return total


@given(st.lists(spans, max_size=60), st.integers(1, 9))
def test_spans_are_bounded_and_no_second_of_a_trial_is_lost(given: list[Span], most: int) -> None:
    kept: list[Span] = []
    for span in sorted(given):
        add_span(kept, span, 2 * most)
    assert all(a[1] <= b[0] for a, b in pairwise(kept))
    few = coarsened(kept, most)
    assert len(few) <= most
    assert seconds_of(few) == pytest.approx(seconds_of(given))
    if given:
        assert few[0][0] == min(given)[0]
        assert few[-1][1] == pytest.approx(max(span[1] for span in given))


def test_tasks_of_one_trial_are_joined_before_those_of_several() -> None:
    turns = [(float(n), n + 1.0, ((n // 4 % 2, 1.0),)) for n in range(16)]
    assert [work for _, _, work in coarsened(turns, 4)] == [
        ((0, 4.0),),
        ((1, 4.0),),
        ((0, 4.0),),
        ((1, 4.0),),
    ]


def test_moves_side_by_side_are_one_span_and_clocks_may_differ_a_little() -> None:
    side_by_side: list[Span] = []
    add_span(side_by_side, (0.0, 9.0, ((0, 9.0),)), 8)
    add_span(side_by_side, (1.0, 10.0, ((1, 9.0),)), 8)
    assert side_by_side == [(0.0, 10.0, ((0, 9.0), (1, 9.0)))]
    late: list[Span] = []
    add_span(late, (0.0, 9.0, ((0, 9.0),)), 8)
    add_span(late, (8.9, 18.0, ((1, 9.1),)), 8)
    assert late == [(0.0, 9.0, ((0, 9.0),)), (9.0, 18.0, ((1, 9.1),))]


def simulated(trials: int, budget: int, microbatches: int) -> tuple[DevicesWorked, float, dict]:
    """What two devices tell of sub-epochs, how long they took, and the checked peaks."""
    shards = (ShardSpec(10, activations=2),) * 3
    specs = [VisitSpec(n, TaskGraph(3, microbatches), shards) for n in range(trials)]
    moment = [0.0]
    simulation = WorkerSimulation(specs, [budget] * 2, 40, sharp, lambda action: 1.0)
    log = DeviceLog(simulation.state, lambda run: 7 + run)
    handle = simulation.state.handle

    def logged(events: list) -> list:
        moment[0] = simulation._now
        log.hear(simulation._now, events)
        answers = handle(events)
        log.look()
        return answers

    simulation.state.handle = logged  # type: ignore[assignment, method-assign]
    timeline = simulation.run()
    return log.report("a", moment[0]), moment[0], {**timeline.peak, "busy": timeline.busy}


@pytest.mark.parametrize("microbatches", [1, 40])
def test_a_report_has_the_simulators_seconds_and_peaks(microbatches: int) -> None:
    report, seconds, found = simulated(3, 24, microbatches)
    assert (report.incarnation, report.seconds) == ("a", seconds)
    devices = {work.device: work for work in report.devices}
    assert devices.keys() == {0, 1, HOST}
    assert devices[0].computing + devices[1].computing == found["busy"]
    for number, work in devices.items():
        assert found[number] <= work.peak <= (work.budget or 0)  # what is given counts at once
        assert max(len(work.tasks), len(work.moves)) <= MOST_SPANS
        assert sum(seconds_of(list(work.tasks)).values()) == pytest.approx(work.computing, abs=0.1)
        assert {trial for _, _, did in work.tasks for trial, _ in did} <= {7, 8, 9}
        assert all(0 <= begin < end <= seconds for begin, end, _ in (*work.tasks, *work.moves))
    assert devices[HOST].computing == 0 < devices[HOST].copying


def test_a_report_begins_where_the_one_before_ended() -> None:
    state = WorkerState([20], None, sharp)
    log = DeviceLog(state, lambda run: run)
    log.hear(100.0, added := [VisitAdded(VisitSpec(0, TaskGraph(1, 1), (ShardSpec(8),)))])
    state.handle(added)
    state.handle([ShardArrived(0, 0)])
    log.look()
    load = Action(0, 0, ActionKind.LOAD, device=0)
    log.hear(103.0, moved := [ActionDone(load, 1.0, 8)])
    state.handle(moved)
    first, second = log.report("a", 104.0), log.report("a", 106.0)
    assert first.devices[0] == DeviceWork(0, 0.0, 1.0, 8, 0, 8, 20, (), ((2.0, 3.0, ((0, 1.0),)),))
    assert first.seconds == 4.0
    assert second.seconds == 2.0
    assert second.devices[0] == DeviceWork(0, 0.0, 0.0, 0, 0, 8, 20)
    assert second.devices[1].budget is None


def test_what_devices_tell_decides_nothing() -> None:
    state = HopState(HopConfig(1))
    assert state.handle(DevicesWorked("a", 1.0, ())) == []


def test_the_tasks_of_a_unit_that_ends_were_done_one_after_the_other() -> None:
    state = WorkerState([20], None, sharp)
    log = DeviceLog(state, lambda run: run)
    log.hear(10.0, [VisitAdded(VisitSpec(0, TaskGraph(1, 1), (ShardSpec(8),)))])
    tasks = [Action(0, 0, kind, 0, device=0) for kind in (ActionKind.F, ActionKind.B, ActionKind.U)]
    log.hear(
        16.0,
        [ActionDone(task, seconds) for task, seconds in zip(tasks, (1.0, 3.0, 1.0), strict=True)],
    )
    (work, _) = log.report("a", 20.0).devices
    assert work.computing == 5.0
    assert [span[:2] for span in work.tasks] == [(1.0, 2.0), (2.0, 5.0), (5.0, 6.0)]


def test_a_task_that_was_over_before_the_report_and_is_told_of_later_has_no_span() -> None:
    state = WorkerState([20], None, sharp)
    log = DeviceLog(state, lambda run: run)
    log.hear(10.0, [VisitAdded(VisitSpec(0, TaskGraph(1, 1), (ShardSpec(8),)))])
    log.report("a", 14.0)  # another run has ended, and a unit of this one is under way
    forward, backward = (Action(0, 0, kind, 0, device=0) for kind in (ActionKind.F, ActionKind.B))
    log.hear(15.0, [ActionDone(forward, 2.0), ActionDone(backward, 3.0)])
    (work, _) = log.report("a", 16.0).devices
    assert work.computing == 5.0
    assert [span[:2] for span in work.tasks] == [(0.0, 1.0)]
