"""A device has of a shard's state what its units read, and writes back what they have changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.costs.moves import MoveRates
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import DeviceLost, VisitRestarted
from cerebro_hydra.plan.queues.pick import sharp
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.validate import Key, MemoryCheck, validate_memory
from cerebro_hydra.plan.simulate.worker import WorkerSimulation
from tests.plan.action_text import parse_actions

SHARD = ShardSpec(6, optimizer=4)
SPEC = VisitSpec(0, TaskGraph(2, 1), (SHARD, SHARD), by_modules=True)


def done(spec: VisitSpec, budget: int | None) -> str:
    """Return what one device does of a visit, beside what comes from and goes to other workers."""
    simulation = WorkerSimulation(
        [spec], [budget], None, sharp, lambda action: 1.0,
        double_buffering=False, observe=WorkerState.validate,
    )  # fmt: skip
    actions = [each.action for each in simulation.run().done if each.action.device is not None]
    return " ".join(str(replace(action, device=None)) for action in actions)


def test_a_forward_gets_no_optimizer_state_and_an_update_does() -> None:
    assert done(SPEC, 6) == (
        "t0s0LOAD[p] t0s0F0 "
        "t0s1LOAD t0s1F0 t0s1B0 t0s1U0 t0s1SPILL "  # the last shard turns at once
        "t0s0LOAD t0s0B0 t0s0U0 t0s0SPILL"
    )


def test_what_lacks_comes_beside_what_is_there() -> None:
    assert done(SPEC, None) == (
        "t0s0LOAD[p] t0s0F0 t0s1LOAD t0s1F0 t0s1B0 t0s1U0 t0s0LOAD[o] t0s1SPILL "
        "t0s0B0 t0s0U0 t0s0SPILL"
    )


def test_a_backward_writes_gradients_alone_and_an_update_uses_them_up() -> None:
    shard = replace(SHARD, state=8, gradients=2)
    assert done(replace(SPEC, graph=TaskGraph(2, 2, 2), shards=(shard, shard)), 8) == (
        "t0s0LOAD[p] t0s0F0 t0s1LOAD[pg] t0s1F0 t0s1B0 t0s0LOAD[g] t0s1SPILL[g] t0s0B0 "
        "t0s0F1 t0s0SPILL[g] t0s1LOAD t0s1F1 t0s1B1 t0s1U1 t0s1SPILL[po] "
        "t0s0LOAD t0s0B1 t0s0U1 t0s0SPILL[po]"
    )


def test_a_forward_that_changes_buffers_writes_parameters_alone() -> None:
    shard = replace(SHARD, forward_writes=True)
    assert done(replace(SPEC, shards=(shard, shard)), 6).startswith(
        "t0s0LOAD[p] t0s0F0 t0s0SPILL[p] t0s1LOAD t0s1F0 t0s1B0 t0s1U0 t0s1SPILL t0s0LOAD t0s0B0"
    )


def test_optimizer_state_at_home_is_never_moved_and_needs_no_room() -> None:
    spec = replace(SPEC, at_home=True)
    assert (spec.device_need, spec.host_state_bytes) == (2, 6)
    assert done(spec, 2) == (
        "t0s0LOAD[p] t0s0F0 t0s1LOAD[p] t0s1F0 t0s1B0 t0s1U0 t0s1SPILL[p] "
        "t0s0LOAD[p] t0s0B0 t0s0U0 t0s0SPILL[p]"
    )
    assert replace(spec, whole=True).device_need == 6


@pytest.mark.parametrize("at_home", [True, False])
def test_a_visit_begins_anew_if_a_device_dies_that_was_given_an_update_at_home(
    at_home: bool,
) -> None:
    """Else what the device had is done again."""
    spec = replace(SPEC, by_modules=False, fused=False, at_home=at_home)
    simulation = WorkerSimulation([spec], [None, None], None, sharp, lambda action: 1.0)
    while "t0s1B0@0" not in {str(each.action) for each in simulation.timeline.done}:
        simulation.step()
    assert (VisitRestarted(0) in simulation.state.handle([DeviceLost(0)])) is at_home


def test_an_update_that_no_device_was_given_has_changed_no_home() -> None:
    spec = replace(SPEC, by_modules=False, at_home=True)
    simulation = WorkerSimulation(
        [spec], [2], None, sharp, lambda action: 1.0, double_buffering=False
    )
    while "t0s1SPILL[p]@0" not in {str(each.action) for each in simulation.timeline.done}:
        simulation.step()
    queue = simulation.state.queues[0]
    assert queue.reserved is not None and not queue.given
    assert "t0s0U0" in map(str, queue.reserved.tasks)
    assert VisitRestarted(0) not in simulation.state.handle([DeviceLost(0)])


@pytest.mark.parametrize("at_home", [True, False])
def test_a_visit_begins_anew_if_a_device_dies_that_has_updated_its_home(at_home: bool) -> None:
    """The first device has room for the second shard alone, so that the other one goes on."""
    shards = replace(SHARD, state=30, optimizer=4), SHARD
    spec = replace(SPEC, graph=TaskGraph(2, 2), shards=shards, by_modules=False, at_home=at_home)
    simulation = WorkerSimulation(
        [spec], [8, None], None, sharp, lambda action: 1.0, double_buffering=False
    )
    while "t0s0B0@1" not in map(str, simulation.timeline.given):
        simulation.step()
    assert "t0s1U0@0" in {str(each.action) for each in simulation.timeline.done}
    assert (VisitRestarted(0) in simulation.state.handle([DeviceLost(0)])) is at_home


def test_a_backward_by_modules_writes_buffers_too_as_its_hooks_may() -> None:
    shard = replace(SHARD, state=8, gradients=2, forward_writes=True)
    spec = replace(SPEC, graph=TaskGraph(3, 2, 2), shards=(shard,) * 3)
    for by_modules, parts in ((True, "pg"), (False, "g")):
        told = done(replace(spec, by_modules=by_modules), 8)
        assert f"t0s1SPILL[{parts}]" in told[told.index("t0s1B0") : told.index("t0s0B0")], told


def test_tasks_that_need_all_of_a_shard_get_it_at_once() -> None:
    assert "[" not in done(replace(SPEC, whole=True), 6)


def test_an_evaluation_needs_a_device_for_parameters() -> None:
    spec = replace(SPEC, graph=TaskGraph(2, 2, training=False))
    assert spec.device_need == 2 and spec.host_state_bytes == 6
    assert done(spec, 4) == "t0s0LOAD[p] t0s0F0 t0s1LOAD[p] t0s1F0 t0s0F1 t0s1F1"
    assert replace(spec, whole=True).device_need == 6


def test_a_move_takes_as_long_as_its_parts() -> None:
    rates = MoveRates(device=2.0, disk=1.0)
    seconds = [
        rates.seconds(action, SHARD)
        for action in parse_actions("t0s0LOAD@0 t0s0LOAD[p]@0 t0s0SPILL[o]@0 t0s0LOAD@host")
    ]
    assert seconds == [3.0, 1.0, 2.0, 6.0]


def test_a_unit_ends_before_its_shard_gets_more() -> None:
    """The first shard of a list may be that of the running unit, and of the one behind it."""
    shard = replace(SHARD, state=8, gradients=2)
    graph = TaskGraph(1, 2, 2)
    spec = VisitSpec(0, graph, (shard,), by_modules=True, fused=False)
    simulation = WorkerSimulation([spec], [None], None, sharp, lambda action: 1.0)
    timeline = simulation.run()
    tasks = [each for each in timeline.done if each.action.kind.computes]
    loads = [each for each in timeline.done if each.action.kind is ActionKind.LOAD]
    assert [str(each.action) for each in loads] == [
        "t0s0LOAD[p]@0",
        "t0s0LOAD[g]@0",
        "t0s0LOAD[o]@0",
    ]
    for load in loads:
        assert all(task.end <= load.begin or load.end <= task.begin for task in tasks)


GOOD = "t0s0RECV t0s0LOAD[p]@0 t0s0F0@0 t0s0LOAD[go]@0 t0s0B0@0 t0s0U0@0 t0s0SPILL[po]@0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("LOAD[go]", "LOAD[g]"), "t0s0U0@0: parts 'o' of the shard are not there"),
        (GOOD.replace("t0s0LOAD[go]@0 ", ""), "t0s0B0@0: parts 'g' of the shard are not there"),
        (GOOD.replace("LOAD[go]", "LOAD[pg]"), "the shard is on the device already"),
        (GOOD.replace("SPILL[po]", "SPILL[p]"), "its changes would be lost"),
        (GOOD.replace("t0s0U0@0 t0s0SPILL[po]", "t0s0SPILL[po]"), "its changes would be lost"),
    ],
)
def test_the_check_of_memory_knows_parts(text: str, message: str) -> None:
    apart: dict[Key, dict] = {(0, 0): replace(SHARD, state=8, gradients=2).apart}

    def check(text: str, budget: int) -> None:
        memory = MemoryCheck({0: budget}, None, {(0, 0): 8}, apart=apart)
        validate_memory(parse_actions(text), memory)

    check(GOOD, 8)
    check(GOOD[: GOOD.index(" t0s0LOAD[go]")], 2)
    with pytest.raises(InvalidSchedule, match="budget is 7"):
        check(GOOD, 7)
    with pytest.raises(InvalidSchedule) as refused:
        check(text, 8)
    assert message in str(refused.value)


def test_a_task_names_no_parts() -> None:
    with pytest.raises(ValueError, match="have parts"):
        Action(0, 0, ActionKind.F, 0, parts=tuple(SHARD.sizes))
