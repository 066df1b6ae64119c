"""Stages of a pipeline: by dynamic programme against every cut and every order of the devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, pairwise, permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.plan.messages.actions import ActionKind
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.sizing.stages import (
    Fits,
    PipelineDevices,
    Stages,
    UnitCost,
    balanced_stages,
    fastest_stages,
    stage_bytes,
    stashes_held,
    versions_held,
)
from tests.examples import examples
from tests.plan.schedules.test_plan_gpipe import simulate

Cost = Callable[[list[float], list[float]], float]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[UnitCost], PipelineDevices]:
    count = draw(st.integers(1, 4))
    units = [
        UnitCost(
            draw(st.integers(1, 20)),
            boundary=draw(st.integers(0, 12)),
            weights=draw(st.integers(0, 6)),
            beside=draw(st.integers(0, 6)),
            activations=draw(st.integers(0, 6)),
        )
        for _ in range(draw(st.integers(count, 8)))
    ]
    speeds = tuple(draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=count, max_size=count)))
    rate = st.sampled_from([0.5, 1.0, 4.0, inf])
    row = st.lists(rate, min_size=count, max_size=count).map(tuple)
    links = tuple(draw(st.lists(row, min_size=count, max_size=count)))
    return units, PipelineDevices(speeds, draw(st.sampled_from([(), links])))


def every(
    units: list[UnitCost], devices: PipelineDevices, fits: Fits | None
) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the times of devices and of links for every cut on every order."""
    d = len(devices.speeds)
    for order in permutations(range(d)):
        for cuts in combinations(range(1, len(units)), d - 1):
            ranges = [range(a, b) for a, b in pairwise((0, *cuts, len(units)))]
            placed = list(enumerate(zip(ranges, order, strict=True)))
            if fits is not None and not all(
                fits(units_, q, device) for q, (units_, device) in placed
            ):
                continue
            busy = [sum(units[k].seconds for k in r) / devices.speeds[n] for _, (r, n) in placed]
            sending = [0.0]
            for (a, _), (b, r) in pairwise(zip(order, ranges, strict=True)):
                sending.append(units[r.start].boundary / devices.bandwidth(a, b))
            yield busy, sending


def check(stages: Stages, units: list[UnitCost], devices: PipelineDevices) -> None:
    assert [k for each in stages.units for k in each] == list(range(len(units)))
    assert all(stages.units)
    assert sorted(stages.devices) == list(range(len(devices.speeds)))
    for place, (each, device) in enumerate(zip(stages.units, stages.devices, strict=True)):
        seconds = sum(units[k].seconds for k in each) / devices.speeds[device]
        assert stages.busy[place] == pytest.approx(seconds)


def window(microbatches: int) -> Cost:
    def cost(busy: list[float], sending: list[float]) -> float:
        return sum(busy) + sum(sending) + (microbatches - 1) * max(*busy, *sending)

    return cost


def slowest(busy: list[float], sending: list[float]) -> float:
    return max(*busy, *sending)


@settings(max_examples=examples(150))
@given(worlds(), st.integers(1, 9), st.none() | st.integers(5, 40))
def test_no_cut_on_any_order_of_the_devices_is_better(
    world: tuple[list[UnitCost], PipelineDevices], microbatches: int, budget: int | None
) -> None:
    units, devices = world
    d = len(devices.speeds)

    def holds(stage: range, place: int, device: int) -> bool:
        versions = versions_held("pipedream", place, d, 9)
        stashes = stashes_held("pipedream", place, d, 1, 9)
        mine = [units[k] for k in stage]
        limit = (budget or 0) * (1 + device % 2)
        return stage_bytes(mine, versions, stashes, recompute=False, first=place == 0) <= limit

    fits = None if budget is None else holds
    found = list(every(units, devices, fits))
    if not found:
        with pytest.raises(ValueError, match="no stages fit the devices"):
            fastest_stages(units, devices, fits)
        with pytest.raises(ValueError, match="no stages fit the devices"):
            balanced_stages(units, devices, microbatches, fits)
        return
    fastest = fastest_stages(units, devices, fits)
    check(fastest, units, devices)
    assert fastest.slowest == pytest.approx(min(slowest(*times) for times in found))
    balanced = balanced_stages(units, devices, microbatches, fits)
    check(balanced, units, devices)
    least = min(window(microbatches)(*times) for times in found)
    assert balanced.seconds(microbatches) == pytest.approx(least)


def test_a_short_window_rather_has_a_slower_device_than_a_link_to_wait_for() -> None:
    units = [UnitCost(3.0), UnitCost(1.0), UnitCost(4.0, boundary=6)]
    devices = PipelineDevices((1.0, 1.0), ((inf, 2.0), (2.0, inf)))
    assert fastest_stages(units, devices).units == (range(0, 2), range(2, 3))
    for microbatches, first in ((1, 1), (3, 1), (10, 2)):
        assert balanced_stages(units, devices, microbatches).units[0] == range(0, first)


def test_a_slow_link_moves_the_boundary_and_a_fast_device_has_more() -> None:
    even = (
        [UnitCost(1.0, boundary=4)] * 3
        + [UnitCost(1.0, boundary=40)]
        + [UnitCost(1.0, boundary=4)] * 2
    )
    fast = PipelineDevices((1.0, 1.0))
    slow = PipelineDevices((1.0, 1.0), ((inf, 4.0), (4.0, inf)))
    assert fastest_stages(even, fast).units == (range(0, 3), range(3, 6))
    assert fastest_stages(even, slow).units == (range(0, 2), range(2, 6))
    assert fastest_stages(even, PipelineDevices((2.0, 1.0))).units == (range(0, 4), range(4, 6))


def test_more_devices_than_units_are_refused_and_many_keep_their_order() -> None:
    with pytest.raises(ValueError, match="2 units can't be stages of 3 devices"):
        fastest_stages([UnitCost(1.0)] * 2, PipelineDevices((1.0,) * 3))
    many = PipelineDevices((1.0, 2.0) * 4)
    assert fastest_stages([UnitCost(1.0)] * 12, many).devices == tuple(range(8))


@settings(max_examples=examples(60))
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from(["gpipe", "1f1b"]),
)
def test_a_simulated_window_takes_what_is_predicted_or_less(
    seconds: list[int], microbatches: int, schedule: str
) -> None:
    shards = tuple(ShardSpec(1, forward=each, backward=2 * each) for each in seconds)
    d = len(shards)
    spec = VisitSpec(
        0, TaskGraph(d, microbatches, microbatches), shards, schedule=schedule, devices=d
    )
    made = simulate([spec], d).makespan
    units = [UnitCost(shard.forward + shard.backward) for shard in shards]
    predicted = balanced_stages(units, PipelineDevices((1.0,) * d), microbatches)
    assert made <= predicted.seconds(microbatches) + 1e-9
    if schedule == "gpipe":
        assert made == pytest.approx(predicted.seconds(microbatches))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (3, 4), (4, 8), (4, 2)])
def test_bytes_of_synchronous_stages_are_those_of_timelines(
    schedule: str, devices: int, microbatches: int
) -> None:
    graph = TaskGraph(devices, 2 * microbatches, microbatches)
    shards = (ShardSpec(8, 3, 2),) * devices
    spec = VisitSpec(0, graph, shards, recompute=False, schedule=schedule, devices=devices)
    timeline = simulate([spec], devices)
    unit = UnitCost(3.0, boundary=2, weights=5, beside=3, activations=3)
    for place in range(devices):
        stashes = stashes_held(schedule, place, devices, microbatches, 2 * microbatches)
        open_ = most = 0
        for each in timeline.done:
            if each.action.device == place and each.action.kind.computes:
                open_ += (each.action.kind is ActionKind.F) - (each.action.kind is ActionKind.B)
                most = max(most, open_)
        assert most == stashes
        assert versions_held(schedule, place, devices, 2) == 1
        assert stage_bytes([unit], 1, stashes, False, place == 0) == timeline.peak[place]


def test_bytes_with_recomputation_keep_the_input_of_a_stage_alone() -> None:
    units = [UnitCost(1.0, boundary=4, weights=10, beside=20, activations=7)] * 2
    first = stage_bytes(units, versions=2, stashes=3, recompute=True, first=True)
    assert first == 2 * 2 * 10 + 2 * 20 + 14
    later = stage_bytes(units, versions=2, stashes=3, recompute=True, first=False)
    assert later == first + 3 * 2
    assert stashes_held("sequential", 0, 4, 8, 8) == 1
