"""1F1B: its lists, their order, how long devices wait, and how little they keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.pipelining.schedules import Schedule1F1B

from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.one_forward_one_backward import one_forward_one_backward
from tests.plan.schedules.test_plan_gpipe import F, U, passes, simulate, spec_of

SIZES = [(2, 4), (3, 4), (4, 8), (3, 1), (4, 2)]


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (3, 4), (4, 8), (4, 4)])
def test_the_passes_are_those_of_torch(devices: int, microbatches: int) -> None:
    theirs = Schedule1F1B.__new__(Schedule1F1B)  # its order needs no process group
    theirs._num_stages = theirs.pp_group_size = devices
    theirs._n_microbatches = microbatches
    order = theirs._get_pipeline_order()
    assert order is not None
    lists = one_forward_one_backward(TaskGraph(devices, microbatches, microbatches), 0, 0, devices)
    for rank, ours in enumerate(lists):
        # torch numbers the forwards of the last rank from 1, where it has no use for the number.
        late = rank == devices - 1
        assert [task for task in ours if task.kind is not U] == passes(order[rank], first=late)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_devices_wait_as_in_gpipe(devices: int, microbatches: int, recompute: bool) -> None:
    spec = spec_of(devices, microbatches, 3, recompute=recompute, backward=2.0)
    spans = [
        simulate([replace(spec, schedule=schedule)], devices).makespan
        for schedule in ("gpipe", "1f1b")
    ]
    assert spans == [pytest.approx(3 * 3 * (microbatches + devices - 1))] * 2


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_a_device_keeps_one_microbatch_more_than_devices_are_behind_it(
    devices: int, microbatches: int
) -> None:
    spec = replace(spec_of(devices, microbatches, recompute=False), schedule="1f1b")
    most = [min(devices - place, microbatches) for place in range(devices)]
    assert spec.most_open == most[0]
    activations = spec.shards[0].activations
    peaks = [activations] * (devices - 1) + [0]
    each = activations + spec.boundary_bytes  # with what devices read of others
    kept = [n * each + peak for n, peak in zip(most, peaks, strict=True)]
    assert [share.held for share in spec.shares()] == kept


def test_a_window_that_is_shorter_than_the_pipeline_is_done_whole() -> None:
    lists = one_forward_one_backward(TaskGraph(3, 2, 2), 0, 0, 3)
    assert [[t.microbatch for t in tasks if t.kind is F] for tasks in lists] == [[0, 1]] * 3


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_hand_overs_cost_what_is_known_of_them(schedule: str) -> None:
    """GPipe pays them while it fills and drains, 1F1B for each microbatch, too."""
    devices, each = 4, 0.1

    def makespan(microbatches: int, hand_over: float) -> float:
        spec = replace(spec_of(devices, microbatches, recompute=False), schedule=schedule)
        return simulate([spec], devices, hand_over=hand_over).makespan

    few, many = (makespan(m, each) - makespan(m, 0.0) for m in (8, 32))
    of_window = 2 * (devices - 1) * each
    assert few >= of_window - 1e-9
    of_batch = 0.0 if schedule == "gpipe" else of_window / devices
    assert many - few == pytest.approx((32 - 8) * of_batch)
