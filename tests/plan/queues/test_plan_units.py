"""Units: what a device does between two messages."""

from __future__ import annotations

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.visit import (
    UNIT_SECONDS,
    ShardSpec,
    Unit,
    Visit,
    VisitSpec,
)
from cerebro_hydra.plan.schedules.graph import TaskGraph

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
