from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.plan.messages.actions import HOST, Action, ActionKind, Part
from cerebro_hydra.plan.schedules.graph import TaskGraph
from tests.plan.action_text import format_actions, parse_action, parse_actions

GOLDEN = Path(__file__).parent / "golden"
SCHEDULES = {
    "sequential_3x2": TaskGraph(3, 2, 2).tasks(3, 0),
    "sequential_3x2_barrier": TaskGraph(3, 2, 2, barrier=True).tasks(3, 0),
    "sequential_3x1_send": TaskGraph(3, 1).tasks(0, 0, send=True),
    "sequential_2x2_barrier_send": TaskGraph(2, 2, 2, barrier=True).tasks(0, 0, send=True),
    "sequential_3x1_tied_owner_behind": TaskGraph(3, 1, tied=((2, 0),)).tasks(0, 0),
}

numbers = st.integers(0, 10**6)
kinds = {
    computes: [kind for kind in ActionKind if kind.computes is computes]
    for computes in (False, True)
}
computing = st.builds(
    Action, numbers, numbers, st.sampled_from(kinds[True]), numbers, st.none() | numbers
)
moving = st.builds(
    Action, numbers, numbers, st.sampled_from(kinds[False]), st.none(),
    st.none() | st.just(HOST) | numbers,
)  # fmt: skip


parted = st.builds(
    Action, numbers, numbers, st.sampled_from((ActionKind.LOAD, ActionKind.SPILL)), st.none(),
    st.none() | numbers,
    st.sets(st.sampled_from(Part)).map(lambda parts: tuple(p for p in Part if p in parts)),
)  # fmt: skip


@given(st.lists(computing | moving | parted))
def test_a_list_of_actions_round_trips_through_text(actions: list[Action]) -> None:
    assert parse_actions(format_actions(actions)) == actions


def test_text_is_what_people_write() -> None:
    assert str(Action(3, 1, ActionKind.F, 0)) == "t3s1F0"
    assert parse_action("t3s1LOAD") == Action(3, 1, ActionKind.LOAD)
    assert str(Action(3, 1, ActionKind.B, 0, device=2)) == "t3s1B0@2"
    assert parse_action("t3s1SPILL@host") == Action(3, 1, ActionKind.SPILL, device=HOST)
    brought = Action(3, 1, ActionKind.LOAD, device=0, parts=(Part.GRADIENTS, Part.OPTIMIZER))
    assert str(brought) == "t3s1LOAD[go]@0" and parse_action("t3s1LOAD[go]@0") == brought


@pytest.mark.parametrize(
    "text",
    [
        "",
        "t3s1",
        "t3s1F",
        "t3s1LOAD0",
        "t03s1F0",
        "s1F0",
        "t3s1X0",
        "t٣s1F0",
        "t3s1F0@",
        "t3s1LOAD@02",
        "t3s1LOAD[]",
        "t3s1LOAD[og]",
    ],
)
def test_other_text_is_refused_with_what_it_should_look_like(text: str) -> None:
    with pytest.raises(ValueError, match="t3s1F0"):
        parse_action(text)


def test_a_wrong_word_is_named_with_its_line() -> None:
    with pytest.raises(ValueError, match="line 2: 'oops'"):
        parse_actions("t0s0F0  # fine\nt0s0B0 oops\n")


@pytest.mark.parametrize(
    ("kind", "microbatch"), [(ActionKind.F, None), (ActionKind.SEND, 0), (ActionKind.B, -1)]
)
def test_an_action_without_text_cannot_be_made(kind: ActionKind, microbatch: int | None) -> None:
    with pytest.raises(ValueError, match=r"microbatch|negative"):
        Action(0, 0, kind, microbatch)


def test_computing_needs_a_device_and_not_the_host() -> None:
    with pytest.raises(ValueError, match="F needs the number of a device"):
        parse_action("t0s0F0@host")
    with pytest.raises(ValueError, match="LOAD needs the number of a device"):
        Action(0, 0, ActionKind.LOAD, device=-2)


@pytest.mark.parametrize("text", ["t0s0SEND[p]", "t0s0LOAD[p]@host", "t0s0DROP[o]@1"])
def test_parts_are_those_of_a_move_between_dram_and_a_device(text: str) -> None:
    with pytest.raises(ValueError, match="have parts"):
        parse_action(text)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_give_their_golden_actions(name: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text()
    assert format_actions(SCHEDULES[name]) == text
    assert parse_actions(text) == SCHEDULES[name]
