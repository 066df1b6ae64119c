from __future__ import annotations

import pytest

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.validate import MemoryCheck, validate_memory, validate_order
from tests.plan.action_text import parse_action, parse_actions


def needs(graph: TaskGraph, text: str) -> list[str]:
    return [str(need) for need, _ in graph.needs(parse_action(text))]


def order_of(graph: TaskGraph) -> list[Action]:
    return [task for window in range(graph.windows) for task in graph.tasks(0, window)]


def test_the_last_window_may_be_smaller() -> None:
    graph = TaskGraph(shards=1, microbatches=5, window=2)
    windows = [" ".join(map(str, graph.tasks(0, window))) for window in range(graph.windows)]
    assert windows == [
        "t0s0F0 t0s0B0 t0s0F1 t0s0B1 t0s0U1",
        "t0s0F2 t0s0B2 t0s0F3 t0s0B3 t0s0U3",
        "t0s0F4 t0s0B4 t0s0U4",
    ]


def test_a_task_waits_for_its_window_its_neighbours_and_its_tied_group() -> None:
    graph = TaskGraph(shards=3, microbatches=4, window=2, tied=((0, 2),))
    assert needs(graph, "t0s0F0") == []
    assert needs(graph, "t0s1F2") == ["t0s0F2", "t0s1U1", "t0s1F1"]
    assert needs(graph, "t0s2F2") == ["t0s1F2", "t0s0U1", "t0s2U1", "t0s2F1"]
    assert needs(graph, "t0s1B1") == ["t0s1F1", "t0s2B1", "t0s1B0"]
    assert needs(graph, "t0s1U3") == ["t0s1B2", "t0s1B3"]
    assert needs(graph, "t0s0U3") == ["t0s0B2", "t0s0B3", "t0s2B2", "t0s2B3"]
    assert needs(graph, "t0s0SEND") == ["t0s0U3"]
    barrier = TaskGraph(shards=2, microbatches=2, window=2, barrier=True)
    assert needs(barrier, "t0s1U1") == ["t0s0B0", "t0s0B1", "t0s1B0", "t0s1B1"]


def test_an_evaluation_has_forwards_alone() -> None:
    graph = TaskGraph(shards=2, microbatches=2, training=False)
    assert " ".join(map(str, order_of(graph))) == "t0s0F0 t0s1F0 t0s0F1 t0s1F1"
    validate_order(order_of(graph), {0: graph})
    with pytest.raises(InvalidSchedule, match="t0s0B0: an evaluation has forwards alone"):
        validate_order(parse_actions("t0s0F0 t0s0B0"), {0: graph})


def test_a_window_waits_for_the_update_of_the_one_before() -> None:
    graph = TaskGraph(shards=1, microbatches=2, window=1)
    validate_order(order_of(graph), {0: graph})
    with pytest.raises(InvalidSchedule, match=r"t0s0F1: t0s0U0 is missing.*weights it reads"):
        validate_order(parse_actions("t0s0F0 t0s0B0 t0s0F1"), {0: graph})


GOOD = "t0s0RECV t0s0LOAD@1 t0s0F0@1 t0s0B0@1 t0s0SPILL@1 t0s0SPILL@host t0s0LOAD@host"


def check_memory(text: str, device: int = 6, host: int | None = 4) -> None:
    memory = MemoryCheck({0: 9, 1: device}, host, {(0, 0): 4, (0, 1): 4}, {(0, 0): 2})
    validate_memory(parse_actions(text), memory)


def test_a_shard_may_go_through_all_tiers() -> None:
    check_memory(GOOD)
    check_memory(GOOD.replace("t0s0B0@1 t0s0SPILL@1", "t0s0DROP@1"))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("t0s0RECV t0s0LOAD@1 t0s0F0@0", "action 2, t0s0F0@0: the shard is not on the device"),
        ("t0s0RECV t0s0LOAD@1 t0s0LOAD@0", "the shard is on the device already"),
        ("t0s0RECV t0s0LOAD@1 t0s0SPILL@0", "the shard is not on the device"),
        ("t0s0RECV t0s0LOAD@1 t0s0B0@1 t0s0DROP@1", "changes would be lost"),
        ("t0s0RECV t0s0SPILL@host t0s0LOAD@1", "the shard is on disk"),
        ("t0s0RECV t0s0LOAD@1 t0s0SPILL@host", "still on a device"),
        ("t0s0RECV t0s0LOAD@host", "in DRAM already"),
        ("t0s0RECV t0s0RECV", "was received before"),
        ("t0s0RECV t0s1RECV", "8 bytes are resident, but the budget is 4"),
        ("t0s0RECV t0s0LOAD@7", "there is no such device"),
        ("t0s0LOAD@1", "nor anywhere else"),
    ],
)
def test_a_shard_out_of_place_is_named_with_the_rule(text: str, rule: str) -> None:
    with pytest.raises(InvalidSchedule, match=rule):
        check_memory(text)


def test_activations_count_while_a_task_runs() -> None:
    with pytest.raises(InvalidSchedule, match=r"t0s0F0@1: 6 bytes .* budget is 5"):
        check_memory(GOOD, device=5)
    memory = MemoryCheck({0: 9}, None, {(0, 0): 4}, {(0, 0): 2})
    validate_memory(parse_actions("t0s0RECV"), memory)
    memory.begin(parse_action("t0s0LOAD@0"))
    with pytest.raises(InvalidSchedule, match="not on the device"):  # the load has not ended
        memory.begin(parse_action("t0s0F0@0"))


def test_what_forwards_keep_counts_until_their_backwards() -> None:
    memory = MemoryCheck({0: 8, 1: 8}, None, {(0, 0): 4}, {(0, 0): 2}, keeping=[0])
    validate_memory(
        parse_actions("t0s0RECV t0s0LOAD@0 t0s0F0@0 t0s0F1@0 t0s0B0@0 t0s0F2@0"), memory
    )
    with pytest.raises(InvalidSchedule, match="t0s0F3@0: 10 bytes are resident"):
        memory.begin(parse_action("t0s0F3@0"))


def test_a_backward_is_where_its_forward_has_kept_what_it_needs() -> None:
    memory = MemoryCheck({0: 9, 1: 9}, None, {(0, 0): 4}, {(0, 0): 2}, keeping=[0])
    moved = "t0s0RECV t0s0LOAD@0 t0s0F0@0 t0s0DROP@0 t0s0LOAD@1 t0s0B0@1"
    with pytest.raises(InvalidSchedule, match="t0s0B0@1: its forward was on device 0"):
        validate_memory(parse_actions(moved), memory)


def test_what_an_abandoned_run_has_kept_is_gone_and_counts_when_it_begins_anew() -> None:
    memory = MemoryCheck({0: 8}, None, {(0, 0): 4}, {(0, 0): 2}, keeping=[0])
    begun = parse_actions("t0s0RECV t0s0LOAD@0 t0s0F0@0 t0s0F1@0")
    validate_memory(begun, memory)
    memory.abandon(0)
    validate_memory(parse_actions("t0s0F2@0 t0s0DROP@0 t0s0DROP@host"), memory)
    memory.begin_anew(0)
    validate_memory(begun, memory)
    with pytest.raises(InvalidSchedule, match="t0s0F2@0: 10 bytes are resident"):
        memory.begin(parse_action("t0s0F2@0"))


def test_a_run_can_not_begin_anew_while_a_shard_of_it_is_there() -> None:
    memory = MemoryCheck({0: 8}, None, {(0, 0): 4})
    validate_memory(parse_actions("t0s0RECV t0s0LOAD@0"), memory)
    memory.abandon(0)
    with pytest.raises(InvalidSchedule, match="t0s0 is there when its visit begins anew"):
        memory.begin_anew(0)


def test_what_was_kept_on_a_lost_device_is_gone() -> None:
    memory = MemoryCheck({0: 8}, None, {(0, 0): 4}, {(0, 0): 2}, keeping=[0])
    validate_memory(parse_actions("t0s0RECV t0s0LOAD@0 t0s0F0@0 t0s0F1@0"), memory)
    memory.lose(0)
    validate_memory(parse_actions("t0s0LOAD@0 t0s0F0@0 t0s0F1@0 t0s0B0@0"), memory)
