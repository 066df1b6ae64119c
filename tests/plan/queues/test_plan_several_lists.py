"""Runs with a list for each device: what they hold at once, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    DeviceJoined,
    DeviceLost,
    VisitAdded,
    VisitEnded,
    VisitRestarted,
    WorkerEvent,
)
from cerebro_hydra.plan.queues.pick import oldest_first, sharp
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation, WorkerTimeline
from tests.plan.queues.test_plan_worker_chaos import check_boundaries, check_changes, seconds_of

SHARD = ShardSpec(1, backward=1.0)


def gpipe_run(visit: int, graph: TaskGraph, shard: ShardSpec = SHARD, **spec: bool) -> VisitSpec:
    shards = (shard,) * graph.shards
    return VisitSpec(visit, graph, shards, fused=False, schedule="gpipe", devices=2, **spec)


def evaluation(visit: int, shards: int) -> VisitSpec:
    """Return an evaluation that stays on its device."""
    graph = TaskGraph(shards, 1, training=False)
    return VisitSpec(visit, graph, (SHARD,) * shards, recompute=False, fused=False)


def simulate(
    specs: list[VisitSpec],
    budgets: Sequence[int | None],
    host: int | None = None,
    later: Sequence[tuple[float, WorkerEvent]] = (),
    move: float = 0.0,
    double_buffering: bool = True,
) -> WorkerTimeline:
    """Run to the end, and check all that any visit must keep."""
    added = {event.spec.visit: event.spec for _, event in later if isinstance(event, VisitAdded)}
    visits = [*specs, *added.values()]
    seconds = seconds_of(visits, move)
    timeline = WorkerSimulation(
        specs, budgets, host, oldest_first, seconds, double_buffering=double_buffering,
        later=later, observe=WorkerState.validate,
    ).run()  # fmt: skip
    assert {timeline.outcome(spec.visit) for spec in visits} == {"finished"}
    check_changes(timeline, visits)
    check_boundaries(timeline, visits)
    return timeline


def test_a_window_that_stays_takes_its_devices_at_once() -> None:
    """One that took device 0 and all of DRAM waited for what stayed on device 1, for DRAM."""
    pipelined = gpipe_run(3, TaskGraph(4, 1, tied=((0, 1),)), recompute=False)
    specs = [evaluation(0, 1), evaluation(1, 2), evaluation(2, 1), pipelined, evaluation(4, 1)]
    simulate(specs, [2, None, None], host=4, double_buffering=False)


def test_a_window_does_not_begin_beside_what_goes_on_staying_on_one_of_its_devices() -> None:
    """Neither had room on device 1 for its next task, beside what the other was to have there."""
    graph = TaskGraph(3, 1)
    staying = VisitSpec(0, graph, (SHARD,) * 3, recompute=False, fused=False)
    later = [(1.5, VisitAdded(gpipe_run(1, TaskGraph(2, 1), recompute=False)))]
    simulate([staying], [1, 3], later=later)


def slow_update() -> VisitSpec:
    """Return a visit whose first device begins a window while the second one ends that before."""
    shards = (SHARD, replace(SHARD, update=5.0))
    graph = TaskGraph(2, 2)
    return VisitSpec(0, graph, shards, recompute=False, fused=False, schedule="gpipe", devices=2)


def test_a_window_does_not_begin_where_a_unit_of_another_run_was_let_in() -> None:
    """It kept its shard on device 1, where a task was reserved that needed all bytes."""
    guest = VisitSpec(1, TaskGraph(1, 1), (SHARD,))
    simulate([slow_update()], [1, 1], later=[(2.5, VisitAdded(guest))])


def test_a_device_is_kept_for_a_window_that_began_elsewhere() -> None:
    guest = evaluation(1, 1)
    timeline = simulate([slow_update()], [None, None], later=[(4.5, VisitAdded(guest))])
    done = [str(each.action) for each in timeline.done]
    (came,) = (text for text in done if text.startswith("t1s0F0"))
    assert done.index("t0s1B1@1") < done.index(came)


def test_two_windows_that_stay_on_the_same_devices_take_turns() -> None:
    specs = [gpipe_run(visit, TaskGraph(2, 6, 2), recompute=False) for visit in range(2)]
    used: set[int] = set()

    def observe(state: WorkerState) -> None:
        state.validate()
        used.update(len(queue.staying) for queue in state.queues.values())

    seconds = seconds_of(specs, 0.5)
    budgets = [specs[0].device_need] * 2
    WorkerSimulation(specs, budgets, 4, oldest_first, seconds, observe=observe).run()
    assert used == {0, 1, 2}, "a second one is reserved behind what is ending, and no third"


def test_a_new_microbatch_waits_until_the_one_that_it_replaces_is_done_again() -> None:
    """Device 0 goes on meanwhile, and has room for the boundary values of one window."""
    spec = gpipe_run(0, TaskGraph(2, 4, 2))
    short = VisitSpec(1, TaskGraph(1, 1, training=False), (ShardSpec(1, forward=0.25),))
    again = 0
    for quarter in range(1, 60):
        moment = quarter / 4
        lost = [(moment, DeviceLost(1)), (moment + 3.0, DeviceJoined(1))]
        timeline = simulate([spec], [1, 1], later=[(0.0, VisitAdded(short)), *lost])
        tasks = [done.action for done in timeline.done if done.action.kind.computes]
        again += len(tasks) > len(set(tasks)) and VisitRestarted(0) not in timeline.given
    assert again > 5, "of these visits did tasks again"


def test_what_is_taken_back_before_it_begins_has_no_bytes() -> None:
    first = gpipe_run(0, TaskGraph(4, 1))
    kept = gpipe_run(
        1, TaskGraph(4, 1, tied=((0, 1),)), ShardSpec(1, 1, backward=1.0), recompute=False
    )
    for quarter in range(1, 40):
        later = [(quarter / 4, DeviceLost(1)), (quarter / 4 + 0.1, DeviceJoined(1))]
        simulate([first, kept], [kept.device_need, None], later=later, move=0.5)


def test_nothing_is_taken_off_a_device_that_died_at_the_same_moment() -> None:
    spec = gpipe_run(0, TaskGraph(2, 4, 2), recompute=False)
    simulation = WorkerSimulation([spec], [None, None], None, sharp, seconds_of([spec], 0.0))
    state = simulation.state
    while simulation.next_moment <= 5.0:  # device 1 has ended its window, and is idle
        simulation.step()
    assert all(state.ledger.on(device) for device in (0, 1))
    answers = state.handle([DeviceLost(0), DeviceLost(1)])
    assert VisitRestarted(0) in answers
    assert not [each for each in answers if isinstance(each, Action) and each.device in (0, 1)]


def test_an_evaluation_begins_anew_whose_sums_are_lost_with_its_last_answer() -> None:
    """Its end is not decided yet when its last task is done, and the same device is lost."""
    graph = TaskGraph(2, 3, training=False)
    spec = VisitSpec(0, graph, (SHARD,) * 2, fused=False, schedule="gpipe", devices=2)
    simulation = WorkerSimulation([spec], [None, None], None, sharp, seconds_of([spec], 0.0))
    last = Action(0, 1, ActionKind.F, 2)
    queue = simulation.state.queues[1]
    while not queue.given or queue.given[0].tasks != (last,):
        simulation.step()
    answers = simulation.state.handle([ActionDone(replace(last, device=1), 1.0), DeviceLost(1)])
    assert VisitRestarted(0) in answers
    assert VisitEnded(0, "finished") not in answers


def test_a_worker_that_counts_one_microbatch_of_a_window_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = ShardSpec(4, activations=3)
    spec = gpipe_run(0, TaskGraph(2, 3, 3), shard, recompute=False)
    assert spec.device_need == 4 + 3 * 3 + 3, "a state, what a window keeps, and a task's peak"
    assert simulate([spec], [16, 13]).peak[0] == 13, "as the simulated tasks have no peak"
    monkeypatch.setattr(VisitSpec, "_most_kept", lambda spec, tasks: 3)
    with pytest.raises(InvalidSchedule, match="t0s0F2@0: 13 bytes are resident, but the budget is"):
        WorkerSimulation([spec], [12, 12], None, sharp, seconds_of([spec], 0.0)).run()


def test_a_run_that_the_worker_is_too_small_for_is_refused_with_its_whole_window() -> None:
    spec = gpipe_run(0, TaskGraph(2, 3, 3), ShardSpec(4, activations=3), recompute=False)
    (refused,) = WorkerState([12, 13], None, sharp).handle([VisitAdded(spec)])
    assert refused == VisitEnded(0, "refused", "it needs 16 bytes of device 0, which has 12")


def placed(visit: int, place: int, microbatches: int = 2) -> VisitSpec:
    return VisitSpec(visit, TaskGraph(1, microbatches), (SHARD,), fused=False, places=(place,))


def devices_of(timeline: WorkerTimeline, visit: int) -> list[int | None]:
    done = [each.action for each in timeline.done if each.action.kind.computes]
    return [action.device for action in done if action.trial == visit]


def test_a_visit_stays_at_its_place_while_another_device_is_idle() -> None:
    timeline = simulate([placed(0, 1), placed(1, 1)], [None, None])
    assert {*devices_of(timeline, 0), *devices_of(timeline, 1)} == {1}
    assert timeline.makespan == 2 * 4.0, "one after the other"


def test_a_visit_whose_place_has_died_goes_on_elsewhere_and_comes_back() -> None:
    lost: list[tuple[float, WorkerEvent]] = [(2.5, DeviceLost(1)), (4.5, DeviceJoined(1))]
    timeline = simulate([placed(0, 1, 9)], [None, None], later=lost)
    begun = [
        (each.begin, each.action.device) for each in timeline.done if each.action.kind.computes
    ]
    assert {device for begin, device in begun if begin < 2.5} == {1}
    assert {device for begin, device in begun if 2.5 <= begin < 4.5} == {0}
    assert {device for begin, device in begun if begin > 5.5} == {1}
    later = [*lost, (5.0, VisitAdded(placed(1, 1)))]
    assert {*devices_of(simulate([placed(0, 0)], [None, None], later=later), 1)} == {1}


def test_lists_are_done_at_their_places() -> None:
    spec = replace(gpipe_run(0, TaskGraph(2, 2, 2)), places=(2, 0))
    done = simulate([spec], [None] * 3).done
    assert {(d.action.shard, d.action.device) for d in done if d.action.kind.computes} == {
        (0, 2),
        (1, 0),
    }


def test_fewer_lists_than_devices_are_where_the_least_work_is() -> None:
    alone = simulate([gpipe_run(0, TaskGraph(2, 2, 2))], (None,) * 2).makespan
    pipelines = [gpipe_run(number, TaskGraph(2, 2, 2)) for number in (1, 2)]
    timeline = simulate([placed(0, 0), *pipelines], (None,) * 5)
    assert [{*devices_of(timeline, each.visit)} for each in pipelines] == [{1, 2}, {3, 4}]
    assert timeline.makespan == alone
    later: list[tuple[float, WorkerEvent]] = [
        (0.5, DeviceLost(0)),
        (0.5, VisitAdded(gpipe_run(0, TaskGraph(2, 2, 2)))),
    ]
    timeline = simulate([], (None,) * 3, later=[*later, (9.5, DeviceJoined(0))])
    assert {*devices_of(timeline, 0)} == {1, 2}, "not where nobody is alive"


def test_places_that_are_none_are_refused() -> None:
    graph = TaskGraph(2, 2, 2)
    for places in ((0,), (1, 1), (0, 1, 2)):
        with pytest.raises(ValueError, match="name one device for each of the 2 lists of gpipe"):
            replace(gpipe_run(0, graph), places=places)
    with pytest.raises(ValueError, match="the 1 lists of sequential"):
        replace(placed(0, 0), places=(0, 1))
    state = WorkerState([2, 1], None, sharp)
    (refused,) = state.handle([VisitAdded(placed(0, 2))])
    assert refused == VisitEnded(0, "refused", "it is to be on devices (2,), and there are 2")
    large = replace(placed(0, 1), shards=(ShardSpec(2),))
    (refused,) = state.handle([VisitAdded(large)])
    assert refused == VisitEnded(0, "refused", "it needs 2 bytes of device 1, which has 1")
    assert state.handle([VisitAdded(replace(large, places=(0,)))]) != []
