"""The lists of each schedule, the weights that they read, and what PipeDream and 2BW cost."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.errors import ConfigurationError, InvalidSchedule
from cerebro_hydra.plan.messages.actions import Action, ActionKind
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.pipedream import pipedream_graph
from cerebro_hydra.plan.schedules.registry import FLUSHED, SCHEDULES
from cerebro_hydra.plan.schedules.two_buffers import two_buffers, two_buffers_graph
from cerebro_hydra.plan.schedules.validate import validate_order, versions_held
from cerebro_hydra.plan.simulate.worker import WorkerTimeline
from cerebro_hydra.plan.sizing import stages as sizes
from tests.examples import examples
from tests.plan.action_text import parse_actions
from tests.plan.schedules.test_plan_gpipe import simulate
from tests.plan.schedules.test_plan_schedules import done_in_turn

F, B, U = ActionKind.F, ActionKind.B, ActionKind.U
GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Case:
    """A schedule on some devices, over a sub-epoch of microbatches."""

    name: str
    devices: int
    shards: int
    window: int
    microbatches: int

    @property
    def order(self) -> str:
        return "pipedream" if self.name == "vertical" else self.name

    @property
    def graph(self) -> TaskGraph:
        graph = TaskGraph(self.shards, self.microbatches, self.window)
        if self.name in FLUSHED:
            return graph
        if self.name == "2bw":
            return two_buffers_graph(graph, self.devices)
        return pipedream_graph(graph, self.devices, vertical_sync=self.name == "vertical")

    def lists(self) -> list[list[Action]]:
        graph = self.graph
        windows = [SCHEDULES[self.order](graph, 0, w, self.devices) for w in range(graph.windows)]
        return [[task for tasks in each for task in tasks] for each in zip(*windows, strict=True)]

    def spec(self, recompute: bool = True) -> VisitSpec:
        shards = (ShardSpec(8, 3, 2, forward=1.0, backward=2.0),) * self.shards
        return VisitSpec(
            0, self.graph, shards, recompute=recompute, schedule=self.order, devices=self.devices
        )


PIPEDREAM_SIZES = [
    (1, 1, 3), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 3, 4), (2, 5, 3), (3, 3, 2), (3, 3, 5),
    (3, 6, 4), (4, 4, 3), (4, 4, 8), (4, 5, 6),
]  # fmt: skip
TWO_BUFFERS_SIZES = [
    (1, 1, 2, 4), (2, 2, 1, 3), (2, 2, 2, 6), (2, 2, 4, 7), (2, 3, 2, 5), (3, 3, 2, 6),
    (3, 3, 4, 9), (3, 6, 2, 5), (4, 4, 3, 7), (4, 4, 3, 10), (4, 4, 4, 12), (4, 5, 3, 8),
]  # fmt: skip
CASES = {
    "pipedream": [Case("pipedream", d, s, 1, n) for d, s, n in PIPEDREAM_SIZES],
    "vertical": [Case("vertical", d, s, 1, n) for d, s, n in PIPEDREAM_SIZES],
    "2bw": [Case("2bw", *sizes) for sizes in TWO_BUFFERS_SIZES],
}
WINDOWS_SIZES = [
    (1, 1, 2, 3), (2, 2, 1, 2), (2, 2, 2, 5), (2, 2, 4, 4), (2, 3, 4, 4), (2, 5, 3, 6),
    (3, 3, 2, 4), (3, 3, 4, 9), (3, 6, 3, 3), (4, 4, 8, 8), (4, 8, 4, 8), (4, 5, 6, 7),
]  # fmt: skip
INTERLEAVED_SIZES = [
    (1, 2, 2, 2), (2, 2, 2, 4), (2, 4, 1, 2), (2, 4, 2, 4), (2, 4, 3, 5), (2, 4, 4, 4),
    (2, 6, 4, 4), (2, 5, 2, 3), (3, 6, 3, 3), (3, 6, 4, 4), (4, 8, 4, 8), (4, 8, 8, 8),
]  # fmt: skip
SYNCHRONOUS = {
    "gpipe": [Case("gpipe", *sizes) for sizes in WINDOWS_SIZES],
    "1f1b": [Case("1f1b", *sizes) for sizes in WINDOWS_SIZES],
    "interleaved": [Case("interleaved", *sizes) for sizes in INTERLEAVED_SIZES],
}
LISTS = SYNCHRONOUS | CASES
ALL = [case for cases in CASES.values() for case in cases]
EQUAL = [case for case in ALL if case.shards == case.devices]


def short(tasks: list[Action]) -> str:
    return " ".join(f"{task.kind}{task.microbatch}" for task in tasks)


def versions(graph: TaskGraph, shard: int) -> list[int]:
    return [graph.version(shard, k) for k in range(graph.microbatches)]


def text_of(case: Case) -> str:
    graph = case.graph
    lines = [
        f"# {case.devices} devices, {case.shards} shards, {case.microbatches} microbatches"
        f" in windows of {case.window}"
    ]
    for shard in range(case.shards):
        lines.append(f"# s{shard} reads versions {' '.join(map(str, versions(graph, shard)))}")
    for device, tasks in enumerate(case.lists()):
        lines.append(" ".join(str(replace(task, device=device)) for task in tasks))
    return "\n".join(lines) + "\n"


def test_every_schedule_of_lists_has_golden_ones() -> None:
    orders = {case.order for cases in LISTS.values() for case in cases}
    assert orders == SCHEDULES.keys() - {"sequential"}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == LISTS.keys()


@pytest.mark.parametrize("name", LISTS)
def test_the_lists_and_versions_are_the_golden_ones(name: str) -> None:
    path, text = GOLDEN / f"{name}.txt", "\n".join(map(text_of, LISTS[name]))
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text
    assert len(parse_actions(text)) == sum(
        case.shards * (2 * case.microbatches + case.graph.windows) for case in LISTS[name]
    )


def test_the_lists_of_two_devices_are_those_of_the_papers() -> None:
    assert list(map(short, Case("pipedream", 2, 2, 1, 4).lists())) == [
        "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3",
        "F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3",
    ]
    assert list(map(short, Case("2bw", 2, 2, 2, 6).lists())) == [
        "F0 F1 B0 F2 B1 U1 F3 B2 F4 B3 U3 F5 B4 B5 U5",
        "F0 B0 F1 B1 U1 F2 B2 F3 B3 U3 F4 B4 F5 B5 U5",
    ]


def test_the_versions_are_those_of_the_papers() -> None:
    stashed = Case("pipedream", 2, 2, 1, 4).graph
    assert [versions(stashed, shard) for shard in (0, 1)] == [[0, 0, 1, 2], [0, 1, 2, 3]]
    vertical = Case("vertical", 2, 2, 1, 4).graph
    assert [versions(vertical, shard) for shard in (0, 1)] == [[0, 0, 1, 2]] * 2
    assert versions(Case("2bw", 2, 2, 2, 6).graph, 1) == [0, 0, 0, 0, 1, 1]
    # The paper counts inputs from 1: max(floor((k - 1) / m) - 1, 0).
    graph = Case("2bw", 4, 4, 4, 16).graph
    assert versions(graph, 2) == [max((k - 1) // 4 - 1, 0) for k in range(1, 17)]


@settings(max_examples=examples(300))
@given(
    st.sampled_from(["pipedream", "vertical", "2bw"]),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(0, 9),
)
def test_lists_have_each_task_once_and_never_stand_still(
    name: str, devices: int, shards: int, window: int, microbatches: int, seed: int
) -> None:
    window = max(window, min(devices, shards) - 1) if name == "2bw" else 1
    case = Case(name, devices, shards, window, microbatches)
    tasks = sorted(str(task) for tasks in case.lists() for task in tasks)
    plain = (case.graph.tasks(0, number) for number in range(case.graph.windows))
    assert tasks == sorted(str(task) for each in plain for task in each)
    done = done_in_turn(SCHEDULES[case.order], case.graph, devices, Random(seed))
    validate_order(done, {0: case.graph})
    assert all(
        held <= 1 + stale
        for held, stale in zip(versions_held(done, case.graph), case.graph.staleness, strict=True)
    )


@pytest.mark.parametrize("name", ["pipedream", "vertical", "2bw"])
@pytest.mark.parametrize("admitted", range(1, 5))
def test_other_numbers_of_devices_read_the_versions_of_those_at_admission(
    name: str, admitted: int
) -> None:
    """Any fewer can, and as many more as the graph says; one more than that stands still."""
    for shards in range(1, 7):
        window = max(1, min(admitted, shards) - 1) if name == "2bw" else 1
        case = Case(name, admitted, shards, window, 6 * window)
        graph, order = case.graph, SCHEDULES[case.order]
        for devices in range(1, graph.most_devices + 1):
            done = done_in_turn(order, graph, devices, Random(devices))
            validate_order(done, {0: graph})
            held = versions_held(done, graph)
            assert all(n <= 1 + stale for n, stale in zip(held, graph.staleness, strict=True))
        if graph.most_devices < shards:
            with pytest.raises(InvalidSchedule, match="stands still"):
                done_in_turn(order, graph, graph.most_devices + 1, Random(0))


def test_windows_of_2bw_may_be_tied_and_clipped_by_the_norm_of_all_gradients() -> None:
    graph = TaskGraph(4, 10, 3, barrier=True, tied=((3, 0),))
    graph = two_buffers_graph(graph, 4)
    done = done_in_turn(two_buffers, graph, 4, Random(0))
    validate_order(done, {0: graph})
    assert versions_held(done, graph) == [2] * 4


def test_clipping_lets_2bw_wait_more_than_its_order_would_and_less_than_a_flush() -> None:
    def seconds(name: str, barrier: bool) -> float:
        graph = replace(TaskGraph(4, 12, 4, barrier=barrier), staleness=(int(name == "2bw"),) * 4)
        spec = replace(Case(name, 4, 4, 4, 12).spec(), graph=graph)
        return simulate([spec], 4).makespan

    assert [seconds("2bw", barrier) for barrier in (False, True)] == [45, 57]
    assert seconds("1f1b", barrier=True) == 63


# ---------------------------------------------------------------------- what breaks the rule


def test_a_forward_before_its_version_and_a_backward_after_it_are_refused() -> None:
    graph = pipedream_graph(TaskGraph(1, 3, 1), 1)
    graph = replace(graph, staleness=(1,))
    late = "t0s0F0 t0s0F1 t0s0F2"
    with pytest.raises(InvalidSchedule, match=r"t0s0F2: t0s0U0 is missing.*the weights it reads"):
        validate_order(parse_actions(late), {0: graph})
    with pytest.raises(InvalidSchedule, match=r"t0s0F2: weight version 1 .* is not made yet"):
        versions_held(parse_actions(late), graph)
    freed = "t0s0F0 t0s0F1 t0s0B0 t0s0U0 t0s0U1 t0s0B1"
    with pytest.raises(InvalidSchedule, match=r"t0s0U1: t0s0B1 is missing"):
        validate_order(parse_actions(freed), {0: graph})
    with pytest.raises(InvalidSchedule, match=r"t0s0B1: weight version 0 .* there no longer"):
        versions_held(parse_actions(freed), graph)


def test_updates_out_of_their_order_are_refused() -> None:
    graph = replace(TaskGraph(1, 2, 1), staleness=(1,))
    text = "t0s0F0 t0s0F1 t0s0B0 t0s0B1 t0s0U1 t0s0U0"
    with pytest.raises(InvalidSchedule, match=r"t0s0U1: t0s0U0 is missing.*order of their windows"):
        validate_order(parse_actions(text), {0: graph})


def test_a_synchronous_list_has_one_version_and_none_is_read_late() -> None:
    graph = TaskGraph(2, 4, 2)
    done = done_in_turn(FLUSHED["1f1b"], graph, 2, Random(0))
    assert versions_held(done, graph) == [1, 1]


def test_2bw_stands_still_where_windows_are_shorter_than_the_pipeline_and_refuses_them() -> None:
    graph = TaskGraph(4, 8, 2)
    with pytest.raises(InvalidSchedule, match="stands still"):
        done_in_turn(two_buffers, replace(graph, staleness=(1,) * 4), 4, Random(0))
    with pytest.raises(ConfigurationError, match=r"accumulate is 2, and .* first of 4 stages"):
        two_buffers_graph(graph, 4)
    assert two_buffers_graph(graph, 3).staleness == (1,) * 4


def test_pipedream_refuses_what_would_change_or_stop_it() -> None:
    with pytest.raises(ConfigurationError, match="clip_grad_norm is given, which lets every"):
        pipedream_graph(TaskGraph(2, 4, 1, barrier=True), 2)
    with pytest.raises(ConfigurationError, match=r"accumulate is 2, and PipeDream updates after"):
        pipedream_graph(TaskGraph(2, 4, 2), 2)
    tied = TaskGraph(4, 4, 1, tied=((3, 0),))
    with pytest.raises(ConfigurationError, match=r"shards \[0, 3\] share .* stages \[0, 1\] would"):
        pipedream_graph(tied, 2)
    assert pipedream_graph(tied, 2, vertical_sync=True).staleness == (1,) * 4
    assert pipedream_graph(tied, 1).staleness == (0,) * 4, "one stage has all of them"
    within = TaskGraph(4, 4, 1, tied=((2, 3),))
    assert pipedream_graph(within, 2).staleness == (1, 1, 0, 0)


# ---------------------------------------------------------------------- timelines of the simulator


def in_turn(timeline: WorkerTimeline) -> list[Action]:
    """Return what the devices computed, by when it ended; an update is done with what it ends."""
    done = [each for each in timeline.done if each.action.kind.computes]
    return [replace(each.action, device=None) for each in sorted(done, key=lambda each: each.end)]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("case", [each for cases in LISTS.values() for each in cases], ids=str)
def test_the_queues_do_the_lists_and_never_read_another_version(
    case: Case, recompute: bool
) -> None:
    timeline = simulate([case.spec(recompute)], case.devices)
    for device, tasks in enumerate(case.lists()):
        computed = [d.action for d in timeline.done if d.action.kind.computes]
        mine = [task for task in computed if task.device == device]
        assert mine == [replace(task, device=device) for task in tasks]
    validate_order(in_turn(timeline), {0: case.graph})


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_devices_wait_at_the_ends_of_a_sub_epoch_alone(case: Case, recompute: bool) -> None:
    timeline = simulate([case.spec(recompute)], case.devices)
    d, n = case.devices, case.microbatches
    assert 1 - timeline.utilisation == pytest.approx((d - 1) / (n + d - 1))
    assert timeline.makespan == pytest.approx(3 * (n + d - 1))


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_versions_and_stashes_of_a_timeline_are_those_of_the_formulas(case: Case) -> None:
    timeline = simulate([case.spec(recompute=False)], case.devices)
    d, n, graph = case.devices, case.microbatches, case.graph
    updates = graph.windows
    in_sync = case.name == "vertical"
    by_formula = [sizes.versions_held(case.order, s, d, updates, in_sync) for s in range(d)]
    assert versions_held(in_turn(timeline), graph) == by_formula
    unit = sizes.UnitCost(3.0, boundary=2, weights=5, beside=3, activations=3)
    for stage in range(d):
        stashes = sizes.stashes_held(case.order, stage, d, graph.window, n)
        most = kept = 0
        for action in in_turn(timeline):
            if action.shard == stage:
                kept += (action.kind is F) - (action.kind is B)
                most = max(most, kept)
        assert most == stashes
        # A device counts its state with one version, and activations from F to B.
        counted = timeline.peak[stage] + 5 * (by_formula[stage] - 1)
        first = stage == 0
        assert sizes.stage_bytes([unit], by_formula[stage], stashes, False, first) == counted


@pytest.mark.parametrize(
    "case",
    [case for case in SYNCHRONOUS["interleaved"] if case.shards % case.devices == 0],
    ids=str,
)
def test_interleaved_keeps_as_many_parts_as_it_is_ahead(case: Case) -> None:
    d, m = case.devices, min(case.window, case.microbatches)
    v = case.shards // d
    rounds = max(1, m // d)
    q = m // rounds if m % rounds == 0 else m
    done = in_turn(simulate([case.spec(recompute=False)], d))
    for device in range(d):
        kept = most = 0
        for action in done:
            if action.shard % d == device:
                kept += (action.kind is F) - (action.kind is B)
                most = max(most, kept)
        ahead = min((v - 1) * q + 2 * (d - 1 - device), v * m) if v > 1 else d - 1 - device
        assert most == min(ahead + 1, v * m)


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_staleness_of_a_timeline_is_that_of_the_formulas(case: Case) -> None:
    """By how many updates the weights of a step are older than those that it updates."""
    d, graph = case.devices, case.graph
    newest, read = [0] * d, dict[tuple[int, int], int]()
    most = [0] * d
    for action in in_turn(simulate([case.spec()], d)):
        shard, microbatch = action.shard, action.microbatch or 0
        if action.kind is F:
            read[shard, microbatch] = graph.version(shard, microbatch)
            if case.name == "pipedream":
                assert read[shard, microbatch] == newest[shard], "a forward finds what it reads"
        elif action.kind is U:
            window = graph.window_of(microbatch)
            most[shard] = max(most[shard], *(newest[shard] - read[shard, k] for k in window))
            newest[shard] += 1
    last = graph.windows - 1
    formula = {
        "pipedream": [d - 1 - s for s in range(d)],
        "vertical": [d - 1] * d,
        "2bw": [1] * d,
    }[case.name]
    assert most == [min(stale, last) for stale in formula]
