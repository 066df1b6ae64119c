"""Which shards are a stage of a pipeline: against every other cut, by time and by memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import is_flushed, with_versions
from cerebro_hydra.plan.sizing.pipeline import (
    HAND_OVER_SECONDS,
    Pipeline,
    stage_seconds,
    stages_text,
    step_seconds,
)
from tests.examples import examples

SCHEDULES = ("gpipe", "1f1b", "pipedream", "2bw")
WEIGHTS = 10


def visit_of(
    seconds: list[int], window: int, schedule: str = "gpipe", recompute: bool = False
) -> VisitSpec:
    """Return a visit whose shards take these seconds for a microbatch, and twice that backward."""
    shards = tuple(
        ShardSpec(3 * WEIGHTS + 7 * k, 5 + k, 2, forward=n / 3, backward=2 * n / 3)
        for k, n in enumerate(seconds)
    )
    graph = TaskGraph(len(seconds), 4 * window, window)
    return VisitSpec(0, graph, shards, recompute=recompute, schedule=schedule, devices=3)


def cuts(shards: int, number: int) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of so many stages in every way."""
    for inner in combinations(range(1, shards), number - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *inner, shards)))


def cut(visit: VisitSpec, sizes: tuple[int, ...]) -> VisitSpec:
    return replace(visit, graph=replace(visit.graph, stage_sizes=sizes))


def needs(visit: VisitSpec, schedule: str, sizes: tuple[int, ...], recompute: bool) -> int:
    """Return what a device must have that spills nothing, with all versions of the weights."""
    graph = with_versions(replace(visit.graph, stage_sizes=sizes), schedule, len(sizes))
    stale = graph.staleness or (0,) * graph.shards
    shards = tuple(
        replace(shard, state=shard.state + behind * WEIGHTS)
        for shard, behind in zip(visit.shards, stale, strict=True)
    )
    whole = replace(visit, graph=graph, shards=shards, schedule=schedule)
    if not recompute:
        return whole.device_need
    return max(
        sum(shards[k].state for k in stage) + max(shards[k].activations for k in stage)
        for stage in graph.stages(len(sizes))
    )


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=7),
    st.integers(2, 4),
    st.sampled_from(SCHEDULES),
    st.booleans(),
    st.floats(0, 1),
)
def test_no_other_stages_that_a_device_holds_are_faster(
    seconds: list[int], window: int, schedule: str, recompute: bool, room: float
) -> None:
    if schedule == "pipedream":
        window = 1
    visit = visit_of(seconds, window, schedule if is_flushed(schedule) else "1f1b", recompute)
    every = list(cuts(len(seconds), 3))
    bytes_of = [needs(visit, schedule, sizes, recompute) for sizes in every]
    budget = int(min(bytes_of) + room * (max(bytes_of) - min(bytes_of)))
    pipeline = Pipeline(schedule, 3, budget)
    found = pipeline.chosen(visit, (WEIGHTS,) * len(seconds), 3)
    held = [sizes for sizes, nbytes in zip(every, bytes_of, strict=True) if nbytes <= budget]
    slowest = [max(stage_seconds(cut(visit, sizes))) for sizes in held]
    assert found in held
    assert max(stage_seconds(cut(visit, found))) == pytest.approx(min(slowest))
    if schedule == "gpipe":  # whose step takes just what the objective says
        steps = [step_seconds(cut(visit, sizes)) for sizes in held]
        assert step_seconds(cut(visit, found)) == pytest.approx(min(steps))
    # Stages that no device holds spill, and are those of the least time.
    less = replace(pipeline, budget=0)
    assert less.chosen(visit, (WEIGHTS,) * len(seconds), 3) == replace(
        pipeline, budget=None
    ).chosen(visit, (WEIGHTS,) * len(seconds), 3)


def test_neighbours_share_a_device_where_there_are_more_stages() -> None:
    graph = TaskGraph(7, 1, stage_sizes=(3, 1, 1, 2))
    assert graph.stages(9) == [range(0, 3), range(3, 4), range(4, 5), range(5, 7)]
    assert graph.stages(3) == [range(0, 3), range(3, 4), range(4, 7)]
    assert graph.stages(1) == [range(7)]


def test_stages_that_change_no_bit_follow_the_devices_and_others_stay() -> None:
    visit = visit_of([1, 1, 1, 1, 4], 4, "1f1b")
    weights = (WEIGHTS,) * 5
    for devices, expected in {1: (), 2: (4, 1), 3: (1, 3, 1)}.items():
        given_to = Pipeline("1f1b", devices).settled("auto", visit, weights)
        assert given_to.stages == ()
        staged = given_to.staged(replace(visit, devices=devices), weights)
        assert staged.graph.stage_sizes == expected
    for asked, sizes in {"auto": (4, 1), 2: (4, 1), 3: (2, 2, 1), (1, 4): (1, 4)}.items():
        settled = Pipeline("2bw", 2).settled(asked, visit, weights)
        assert (settled.stages, settled.staleness) == (sizes, (1,) * 5)
        assert settled.staged(visit, weights) is visit
    behind = Pipeline("pipedream", 2).settled((1, 3, 1), visit_of([1, 1, 1, 1, 4], 1), weights)
    assert behind.staleness == (2, 1, 1, 1, 0)
    once = Pipeline("pipedream", 1).settled("auto", visit_of([1, 1, 1, 1, 4], 1), weights)
    assert (once.stages, once.staleness) == ((5,), ())


def test_interleaved_devices_have_stages_in_turn() -> None:
    visit = replace(visit_of([1, 1, 1, 1, 4, 1], 4, "interleaved"), devices=2)
    staged = Pipeline("interleaved", 2).staged(
        cut(visit_of([2] * 7, 4, "interleaved"), ()), (1,) * 7
    )
    assert sum(staged.graph.stage_sizes) == 7 and len(staged.graph.stage_sizes) == 6
    four = cut(visit, Pipeline("interleaved", 2).settled(4, visit, (WEIGHTS,) * 6).stages)
    assert sum(four.graph.stage_sizes) == 6
    assert [sorted({task.shard for task in tasks}) for tasks in four.lists(0)] == [
        [k for stage in four.graph.stages(4)[device::2] for k in stage] for device in range(2)
    ]


def test_stages_that_the_cut_does_not_have_are_refused() -> None:
    visit = visit_of([1, 2, 3], 4)
    with pytest.raises(ConfigurationError, match=r"stages is 4, and .* into 3 shards"):
        Pipeline("gpipe", 2).settled(4, visit, (WEIGHTS,) * 3)
    with pytest.raises(ConfigurationError, match=r"is \[2, 2\], which are 4 shards, and .*3"):
        Pipeline("gpipe", 2).settled([2, 2], visit, (WEIGHTS,) * 3)
    with pytest.raises(ConfigurationError, match=r"accumulate is 1, .* or fewer stages"):
        Pipeline("2bw", 3).settled("auto", visit_of([1, 2, 3], 1), (WEIGHTS,) * 3)


@pytest.mark.parametrize(("schedule", "window"), [("pipedream", 1), ("2bw", 4)])
def test_a_step_of_a_schedule_that_does_not_flush_takes_what_the_slowest_stage_does(
    schedule: str, window: int
) -> None:
    visit = replace(visit_of([1, 1, 2, 4, 1], window, schedule), devices=2)
    graph = with_versions(replace(visit.graph, stage_sizes=(3, 2)), schedule, 2)
    assert step_seconds(replace(visit, graph=graph)) == pytest.approx(window * 5)


def test_the_text_says_why_boundaries_lie_there_and_what_a_step_takes() -> None:
    visit = cut(replace(visit_of([1, 1, 2, 4, 1], 4, "gpipe"), devices=2), (3, 2))
    told = stages_text(visit).splitlines()
    assert told[0] == "  2 stages for schedule 'gpipe' on 2 devices"
    assert told[1] == "    stage 0 on device 0: shards 0 to 2, 4000.0 ms of a batch's 9000.0 ms"
    assert told[2].endswith(
        "(the slower stage at this boundary takes 5000.0 ms; it would be 7000.0 ms a shard earlier "
        "and 8000.0 ms a shard later)"
    )
    assert told[3].startswith("    a step of 4 batches takes 24004.0 ms by these times")
    assert step_seconds(visit) == pytest.approx(9 + 3 * 5 + 2 * HAND_OVER_SECONDS)
    three = stages_text(cut(visit, (2, 1, 2))).splitlines()[0]
    assert three.endswith("on 2 devices: neighbours of the trial's 3 share a device")
    worse = stages_text(cut(visit, (1, 4))).splitlines()[2]
    assert worse.endswith("would be 7000.0 ms a shard later; memory, or stages=, decides)")
