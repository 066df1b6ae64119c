"""Interleaved 1F1B: its lists, their order, and how long devices wait."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.interleaved import interleaved
from cerebro_hydra.plan.schedules.one_forward_one_backward import one_forward_one_backward
from tests.plan.schedules.test_plan_gpipe import U, passes, simulate, spec_of


@pytest.mark.parametrize(
    ("devices", "ranges", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 4, 8), (4, 2, 10), (4, 2, 3)]
)
def test_the_passes_are_those_of_torch(devices: int, ranges: int, microbatches: int) -> None:
    theirs = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)  # without a process group
    theirs.pp_group_size, theirs.n_local_stages = devices, ranges
    theirs._n_microbatches = microbatches
    theirs.microbatches_per_round = microbatches // max(1, microbatches // devices)
    graph = TaskGraph(devices * ranges, microbatches, microbatches)
    for rank, ours in enumerate(interleaved(graph, 0, 0, devices)):
        order = theirs._calculate_single_rank_operations(rank)
        assert [task for task in ours if task.kind is not U] == passes(order)


@pytest.mark.parametrize(("devices", "ranges", "microbatches"), [(4, 2, 8), (4, 4, 8), (2, 3, 4)])
def test_devices_wait_as_long_as_theory_says(devices: int, ranges: int, microbatches: int) -> None:
    spec = spec_of(devices * ranges, microbatches, backward=2.0)
    spec = replace(spec, schedule="interleaved", devices=devices)
    bubble = (devices - 1) / (ranges * microbatches + devices - 1)
    assert 1 - simulate([spec], devices).utilisation == pytest.approx(bubble)


def test_shards_that_devices_do_not_divide_are_done_in_ranges() -> None:
    lists = interleaved(TaskGraph(5, 2, 2), 0, 0, 2)
    assert [sorted({task.shard for task in tasks}) for tasks in lists] == [[0, 2], [1, 3, 4]]
    graph = TaskGraph(3, 2, 2)
    assert interleaved(graph, 0, 0, 2) == one_forward_one_backward(graph, 0, 0, 2)
