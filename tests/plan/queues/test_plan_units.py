"""Units: what a device does between two messages."""

from __future__ import annotations

import pytest

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    DeviceLost,
    VisitAdded,
    VisitCancelled,
    VisitEnded,
    VisitRestarted,
)
from cerebro_hydra.plan.queues.pick import oldest_first
from cerebro_hydra.plan.queues.visit import Unit, Visit
from cerebro_hydra.plan.queues.visit_spec import UNIT_SECONDS, ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import AHEAD_SECONDS, WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.simulate.worker import WorkerSimulation

SECONDS = 0.004
LONGEST = round(UNIT_SECONDS / SECONDS)


def units_of(shards: int, *, microbatches: int = 40, **spec: bool) -> list[Unit]:
    """The units of a visit, each of which ends before the next one is asked for."""
    shard = ShardSpec(8, forward=SECONDS, backward=SECONDS, update=SECONDS)
    graph = TaskGraph(shards, microbatches, training=spec.pop("training", True))
    visit = Visit(VisitSpec(0, graph, (shard,) * shards, by_modules=True, **spec), 0)
    for number in range(shards):
        visit.received(number)
    units = []
    while (unit := visit.next_unit(visit.lists[0])) is not None:
        visit.take(unit)
        visit.began(unit)
        visit.end(unit)
        units.append(unit)
    tasks = [task for unit in units for task in unit.tasks]
    assert tasks == [task for window in range(microbatches) for task in graph.tasks(0, window)]
    return units


def shards_of(unit: Unit) -> tuple[int, ...]:
    return tuple(key.number for key in unit.keys)


def microbatches_of(unit: Unit) -> set[int | None]:
    return {task.microbatch for task in unit.tasks}


def test_short_tasks_of_a_run_that_stays_whole_are_one_unit() -> None:
    first, *others = units_of(3, recompute=False)
    assert first.tasks == (Action(0, 0, ActionKind.F, 0),), "nothing has been measured"
    rest, *long = [unit for unit in others if 39 not in microbatches_of(unit)]
    assert microbatches_of(rest) == {0}
    assert rest.ends_microbatch
    for unit in long:
        assert shards_of(unit) == (0, 1, 2)
        assert len(unit.tasks) == 9, "a whole microbatch, because two take too long"
        assert unit.starts_microbatch
        assert unit.ends_microbatch


def test_microbatches_that_are_too_long_for_a_unit_are_several() -> None:
    units = [unit for unit in units_of(6, recompute=False) if 2 in microbatches_of(unit)]
    assert [len(unit.tasks) for unit in units] == [LONGEST, 18 - LONGEST]
    assert [unit.starts_microbatch for unit in units] == [True, False]
    assert [unit.ends_microbatch for unit in units] == [False, True]


def test_short_microbatches_are_one_unit_which_ends_with_one_of_them() -> None:
    _, _, *units = units_of(1, recompute=False)
    assert {len(unit.tasks) for unit in units[:-1]} == {LONGEST - LONGEST % 3}
    assert all(unit.starts_microbatch and unit.ends_microbatch for unit in units)


def test_the_last_window_has_a_unit_for_each_pass_of_a_shard_which_is_published_after_it() -> None:
    last = [unit for unit in units_of(3, recompute=False) if 39 in microbatches_of(unit)]
    assert [shards_of(unit) for unit in last] == [(0,), (1,), (2,), (1,), (0,)]


def test_a_unit_of_a_run_that_spills_has_one_shard() -> None:
    units = units_of(3, recompute=True)
    assert {len(unit.keys) for unit in units} == {1}
    assert max(len(unit.tasks) for unit in units) == 3, "F, B and U of the last shard"


def test_batches_of_an_evaluation_in_one_piece_are_one_unit() -> None:
    first, *others = units_of(1, training=False)
    assert len(first.tasks) == 1
    assert [len(unit.tasks) for unit in others[:-1]] == [LONGEST] * 3
    assert [unit.ends_microbatch for unit in others] == [False, False, False, True]


def test_long_tasks_are_units_as_ever() -> None:
    shard = ShardSpec(8)
    spec = VisitSpec(0, TaskGraph(1, 3), (shard,), by_modules=True, recompute=False)
    visit = Visit(spec, 0)
    for microbatch in range(3):
        unit = visit.next_unit(visit.lists[0])
        assert unit is not None
        assert [task.microbatch for task in unit.tasks] == [microbatch] * 3
        visit.take(unit)
        visit.microbatch = microbatch


# ---------------------------------------------------------------------- units given ahead


def simulation_of(seconds: float, visits: int = 2, **options: bool) -> WorkerSimulation:
    """Return visits by modules on one device without limit, each task of which is a unit."""
    shard = ShardSpec(8, forward=seconds, backward=seconds)
    specs = [
        VisitSpec(number, TaskGraph(3, 20), (shard,) * 3, by_modules=True, fused=False)
        for number in range(visits)
    ]
    kinds = {ActionKind.F: seconds, ActionKind.B: seconds}
    given = (specs, [None], None, oldest_first, lambda action: kinds.get(action.kind, 0.0))
    return WorkerSimulation(*given, observe=WorkerState.validate, **options)


def run_until(simulation: WorkerSimulation, moment: float) -> None:
    while simulation.next_moment <= moment:
        simulation.step()


@pytest.mark.parametrize(("seconds", "ahead"), [(0.001, 20), (0.005, 4), (0.03, 1), (1.0, 1)])
def test_a_device_has_units_ahead_for_some_time_and_one_at_least(
    seconds: float, ahead: int
) -> None:
    simulation = simulation_of(seconds)
    run_until(simulation, 30.5 * seconds)
    (queue,) = simulation.state.queues.values()
    assert len(queue.given) == 1 + ahead
    assert queue.seconds_ahead < AHEAD_SECONDS + 2 * seconds
    simulation.run()
    alone = simulation_of(seconds, double_buffering=False)
    run_until(alone, 30.5 * seconds)
    (queue,) = alone.state.queues.values()
    assert len(queue.given) == 1, "nothing is brought while it computes, and nothing given"


def test_what_a_device_was_given_is_taken_back_by_its_death_and_done_by_nobody_twice() -> None:
    simulation = simulation_of(0.001)
    run_until(simulation, 0.03)
    state = simulation.state
    answers = state.handle([DeviceLost(0)])
    assert not state.queues[0].units and not any(visit.units for visit in state.visits.values())
    assert not any(isinstance(each, tuple) for each in answers), "there is no other device"
    state.validate()


def test_what_a_device_was_given_of_a_cancelled_visit_is_answered_before_it_is_over() -> None:
    simulation = simulation_of(0.001, visits=1)
    run_until(simulation, 0.03)
    state = simulation.state
    left = [*state.queues[0].unanswered]
    assert state.handle([VisitCancelled(0)]) == []
    *answers, last = [state.handle([ActionDone(task, 0.0)]) for task in left]
    assert not any(isinstance(each, VisitEnded) for answer in answers for each in answer)
    assert VisitEnded(0, "cancelled") in last
    assert (state.visits, list(state.ledger)) == ({}, [])


def test_the_first_task_of_a_long_microbatch_that_may_be_done_again_waits_for_its_turn() -> None:
    """It overwrites boundary values of the one before, which a death may still ask for."""
    for seconds, goes_ahead in ((0.001, True), (1.0, False)):
        shard = ShardSpec(8, boundary=1, forward=seconds, backward=seconds)
        spec = VisitSpec(0, TaskGraph(2, 20), (shard,) * 2, fused=False)
        found = set()

        def observe(state: WorkerState, found: set[bool] = found) -> None:
            units = [*state.queues[0].given][1:]
            found.add(any((u.tasks[0].kind, u.tasks[0].shard) == ("F", 0) for u in units))

        done = lambda action: seconds if action.kind.computes else 0.0  # noqa: B023, E731
        given = ([spec], [None], None, oldest_first, done)
        WorkerSimulation(*given, observe=observe).run()
        assert found == {False, goes_ahead}


@pytest.mark.parametrize(("seconds", "restarts"), [(0.001, True), (1.0, False)])
def test_a_device_that_dies_with_units_of_two_microbatches_may_have_begun_the_second(
    seconds: float, restarts: bool
) -> None:
    """Then the boundary values of the first may be overwritten, and its tasks can't be done."""
    shard = ShardSpec(8, boundary=1, forward=seconds)
    spec = VisitSpec(0, TaskGraph(3, 20, training=False), (shard,) * 3)
    done = lambda action: seconds if action.kind.computes else 0.0  # noqa: E731
    simulation = WorkerSimulation([spec], [None, None], None, oldest_first, done)
    run_until(simulation, 9.5 * seconds)
    answers = simulation.state.handle([DeviceLost(0), DeviceLost(1)])
    assert (VisitRestarted(0) in answers) == restarts


@pytest.mark.parametrize("host_budget", [24, 28])
def test_what_comes_from_another_worker_leaves_dram_for_a_visit_that_is_here(
    host_budget: int,
) -> None:
    """The other worker may wait for that visit, so that nothing would ever arrive."""
    never = 1e6
    shard = ShardSpec(8, forward=1.0, backward=1.0, update=1.0)
    here, coming = (VisitSpec(n, TaskGraph(3, 4), (shard,) * 3, by_modules=True) for n in (0, 1))
    simulation = WorkerSimulation(
        [here],
        [12],
        host_budget,
        oldest_first,
        lambda action: never if (action.trial, action.kind) == (1, ActionKind.RECV) else 1.0,
        later=[(20.0, VisitAdded(coming))],
    )
    timeline = simulation.run()
    assert timeline.outcome(0) == timeline.outcome(1) == "finished"
    assert max(each.end for each in timeline.done if each.action.trial == 0) < never
