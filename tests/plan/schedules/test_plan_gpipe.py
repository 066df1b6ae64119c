"""GPipe, as the proof that a schedule is one file: its lists, their order, what the queues make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import ScheduleGPipe

from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.events import (
    ActionDone,
    DeviceLost,
    ShardArrived,
    VisitAdded,
    VisitEnded,
    VisitRestarted,
)
from cerebro_hydra.plan.queues.pick import sharp
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.queues.worker import WorkerState
from cerebro_hydra.plan.schedules.gpipe import gpipe
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import FLUSHED
from cerebro_hydra.plan.schedules.validate import validate, validate_order
from cerebro_hydra.plan.simulate.worker import WorkerSimulation, WorkerTimeline
from tests.plan.action_text import format_actions, parse_actions

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U
GOLDEN = Path(__file__).parents[1] / "messages" / "golden"


def spec_of(
    devices: int, microbatches: int, windows: int = 1, *, recompute: bool = True, **shard: float
) -> VisitSpec:
    graph = TaskGraph(devices, microbatches * windows, microbatches)
    shards = (ShardSpec(8, 3, 2, **{"forward": 1.0, "backward": 1.0, **shard}),) * devices
    return VisitSpec(0, graph, shards, recompute=recompute, schedule="gpipe", devices=devices)


def simulate(
    specs: list[VisitSpec],
    devices: int,
    budget: int | None = None,
    used: Counter[int] | None = None,
    hand_over: float = 0.0,
) -> WorkerTimeline:
    """Run with moves that take no time; ``used`` takes the most bytes that each device had."""

    def seconds(action: Action) -> float:
        shard = specs[action.trial].shards[action.shard]
        return shard.seconds(action.kind) if action.kind.computes else 0.0

    def observe(state: WorkerState) -> None:
        state.validate()
        if used is not None:
            used.update({n: max(0, state.used(n) - used[n]) for n in state.queues})

    budgets = [budget] * devices
    return WorkerSimulation(
        specs, budgets, None, sharp, seconds, observe=observe, hand_over=hand_over
    ).run()


def given(timeline: WorkerTimeline, device: int) -> list[Action]:
    """Return what a device was given to compute."""
    actions = [each for each in timeline.given if isinstance(each, Action)]
    return [each for each in actions if each.kind.computes and each.device == device]


LISTS = sorted(
    path.stem
    for path in GOLDEN.glob("*.txt")
    if path.stem.split("_")[0] in FLUSHED.keys() - {"sequential"}
)
"""The golden lists of each schedule, with the numbers of devices, of ranges on each, and of
microbatches in their names."""


def test_every_schedule_has_golden_lists() -> None:
    assert {name.split("_")[0] for name in LISTS} == FLUSHED.keys() - {"sequential"}


@pytest.mark.parametrize("name", LISTS)
def test_the_lists_are_the_golden_ones_and_what_the_queues_do(name: str) -> None:
    schedule, sizes = name.split("_")
    devices, *ranges, microbatches = map(int, sizes.split("x"))
    shards = devices * prod(ranges)
    graph = TaskGraph(shards, microbatches, microbatches)
    lists = FLUSHED[schedule](graph, 0, 0, devices)
    placed = [
        [replace(task, device=device) for task in tasks] for device, tasks in enumerate(lists)
    ]
    text = (GOLDEN / f"{name}.txt").read_text()
    assert "\n".join(map(format_actions, placed)) == text
    assert parse_actions(text) == [task for tasks in placed for task in tasks]
    spec = replace(spec_of(shards, microbatches), schedule=schedule, devices=devices)
    timeline = simulate([spec], devices)
    assert [given(timeline, device) for device in range(devices)] == placed
    given_to_all = [each for each in timeline.given if isinstance(each, Action)]
    computed = [each for each in given_to_all if each.kind.computes]
    validate(computed, shards=shards, microbatches=microbatches, barrier=False)


def passes(order: Iterable[Any], first: int = 0) -> list[Action]:
    """Return the passes of torch's for a rank, whose forwards have numbers from `first` on."""
    return [
        Action(0, each.stage_index, ActionKind(kind), each.microbatch_index - first * (kind == "F"))
        for each in order
        if each is not None and (kind := each.computation_type.value) in "FB"
    ]


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (3, 4), (4, 8), (3, 1), (4, 2)])
def test_the_passes_are_those_of_torch(devices: int, microbatches: int) -> None:
    theirs = ScheduleGPipe.__new__(ScheduleGPipe)  # its order needs no process group
    theirs._num_stages, theirs._n_microbatches = devices, microbatches
    order = theirs._get_pipeline_order()
    assert order is not None
    lists = gpipe(TaskGraph(devices, microbatches, microbatches), 0, 0, devices)
    for rank, ours in enumerate(lists):
        assert [task for task in ours if task.kind is not U] == passes(order[rank])


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (3, 4), (4, 8), (4, 1)])
def test_devices_wait_as_long_as_theory_says(
    devices: int, microbatches: int, windows: int, recompute: bool
) -> None:
    spec = spec_of(devices, microbatches, windows, recompute=recompute)
    timeline = simulate([spec], devices)
    bubble = (devices - 1) / (microbatches + devices - 1)
    assert 1 - timeline.utilisation == pytest.approx(bubble)
    assert timeline.makespan == pytest.approx(windows * 2 * (microbatches + devices - 1))


def test_unequal_stages_take_the_sum_and_the_slowest_again_for_each_further_microbatch() -> None:
    shards = tuple(ShardSpec(1, forward=seconds, backward=2 * seconds) for seconds in (1, 3, 2))
    spec = VisitSpec(0, TaskGraph(3, 5, 5), shards, schedule="gpipe", devices=3)
    assert simulate([spec], 3).makespan == pytest.approx(3 * (1 + 3 + 2) + 3 * 3 * (5 - 1))


def test_more_shards_than_devices_are_done_in_ranges_and_fewer_leave_devices_free() -> None:
    lists = gpipe(TaskGraph(5, 2, 2), 0, 0, 2)
    assert [sorted({task.shard for task in tasks}) for tasks in lists] == [[0, 1], [2, 3, 4]]
    assert " ".join(map(str, lists[0])) == (
        "t0s0F0 t0s1F0 t0s0F1 t0s1F1 t0s1B0 t0s0B0 t0s1B1 t0s1U1 t0s0B1 t0s0U1"
    )
    assert len(gpipe(TaskGraph(2, 2, 2), 0, 0, 4)) == 2


def test_updates_that_wait_for_other_devices_come_last() -> None:
    barrier = gpipe(TaskGraph(2, 2, 2, barrier=True), 0, 0, 2)
    assert [str(tasks[-1]) for tasks in barrier] == ["t0s0U1", "t0s1U1"]
    tied = gpipe(TaskGraph(4, 1, 1, tied=((3, 0),)), 0, 0, 2)
    assert " ".join(map(str, tied[1])) == "t0s2F0 t0s3F0 t0s3B0 t0s2B0 t0s2U0 t0s3U0"


def test_a_second_trial_fills_the_bubbles() -> None:
    specs = [spec_of(2, 2), replace(spec_of(2, 2), visit=1)]
    alone, both = simulate(specs[:1], 2), simulate(specs, 2)
    assert both.makespan < 2 * alone.makespan
    assert both.utilisation > alone.utilisation


def test_what_a_window_keeps_counts_on_each_device_and_in_dram() -> None:
    spec = spec_of(3, 4)
    assert spec.most_open == 4
    assert spec.host_boundary_bytes == 4 * 3 * 2
    assert spec.device_need == 8 + 3, "a shard and its task; the rest is in DRAM"
    kept = spec_of(3, 4, recompute=False)
    # What it reads is there, too; and the last shard's activations have the peak of all tasks.
    held = [4 * 3 + spec.host_boundary_bytes + more for more in (3, 3, 0)]
    assert [share.held for share in kept.shares()] == held
    assert kept.device_need == 8 + held[0]
    assert kept.task_bytes == (3 + 3 * 2 + 3, 3 + 3 * 2 + 3, 3 + 3 * 2), "of one microbatch"
    used: Counter[int] = Counter()
    timeline = simulate([kept], 3, kept.device_need, used)
    assert used == {device: 8 + nbytes for device, nbytes in enumerate(held)}
    validate_order([each for each in timeline.given if isinstance(each, Action)], {0: kept.graph})
    assert simulate([replace(kept, visit=0), replace(kept, visit=1)], 3, kept.device_need).done


def test_dram_for_one_shard_goes_to_the_list_that_is_ready() -> None:
    """The shard that waits has its next task first in its list, as the one that is ready has."""
    spec = VisitSpec(0, TaskGraph(2, 1), (ShardSpec(1),) * 2, schedule="gpipe", devices=2)
    simulation = WorkerSimulation([spec], [1, None], 1, sharp, lambda action: 1.0)
    assert simulation.run().outcome(0) == "finished"


def test_a_run_is_refused_that_has_too_few_devices_or_too_small_ones() -> None:
    spec = spec_of(3, 4)
    (refused,) = WorkerState([None, None], None, sharp).handle([VisitAdded(spec)])
    assert refused == VisitEnded(0, "refused", "its schedule needs 3 devices, and there are 2")
    (refused,) = WorkerState([None, 10, 11], None, sharp).handle([VisitAdded(spec)])
    assert refused == VisitEnded(0, "refused", "it needs 11 bytes of device 1, which has 10")


def test_a_cut_by_modules_can_not_be_pipelined() -> None:
    with pytest.raises(ValueError, match="which gpipe can't pipeline"):
        VisitSpec(0, TaskGraph(2, 2, 2), (ShardSpec(1),) * 2, True, schedule="gpipe", devices=2)


@pytest.mark.parametrize(("devices", "batches"), [(2, 1), (2, 6), (3, 5), (4, 9)])
def test_an_evaluation_fills_its_devices_once(devices: int, batches: int) -> None:
    shards = (ShardSpec(8, 3, 2, forward=1.0),) * devices
    graph = TaskGraph(devices, batches, training=False)
    spec = VisitSpec(0, graph, shards, schedule="1f1b", devices=devices)
    timeline = simulate([spec], devices)
    assert timeline.makespan == pytest.approx(batches + devices - 1)
    assert all(len(given(timeline, device)) == batches for device in range(devices))


@pytest.mark.parametrize("ended", [3.5, 5.5])
def test_an_evaluation_begins_anew_whose_sums_were_on_a_device_that_died(ended: float) -> None:
    shards = (ShardSpec(8, 3, 2, forward=1.0),) * 2
    spec = VisitSpec(
        0, TaskGraph(2, 6, training=False), shards, schedule="1f1b", devices=2, unit_seconds=0.0
    )
    seconds = lambda action: 1.0 if action.kind.computes else 0.0  # noqa: E731
    simulation = WorkerSimulation([spec], [None, None], None, sharp, seconds)
    while simulation.next_moment < ended:
        simulation.step()
    summed = [d for d in simulation.timeline.done if d.action.kind is F and d.action.shard == 1]
    assert summed, "it has a sum"
    assert VisitRestarted(0) in simulation.state.handle([DeviceLost(1)])


def test_a_task_waits_for_another_device_and_begins_when_that_has_done_it() -> None:
    state = WorkerState([None, None], None, sharp)
    state.handle([VisitAdded(spec_of(2, 2))])
    answers = state.handle([ShardArrived(0, 0), ShardArrived(0, 1)])
    assert [str(each) for each in answers] == ["t0s0LOAD@0"], "shard 1 has nothing to do yet"
    ((task,),) = state.handle([ActionDone(Action(0, 0, ActionKind.LOAD, device=0), 0.0)])
    (following,), load = state.handle([ActionDone(task, 1.0)])
    assert (str(following), str(load)) == ("t0s0F1@0", "t0s1LOAD@1")
    ((task,),) = state.handle([ActionDone(Action(0, 1, ActionKind.LOAD, device=1), 0.0)])
    assert str(task) == "t0s1F0@1", "two microbatches are under way"
