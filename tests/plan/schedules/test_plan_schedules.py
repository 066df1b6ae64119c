from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.messages.actions import Action
from cerebro_hydra.plan.schedules.gpipe import gpipe
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.schedules.registry import FLUSHED, Schedule
from cerebro_hydra.plan.schedules.sequential import sequential
from cerebro_hydra.plan.schedules.validate import validate, validate_order
from tests.examples import examples
from tests.plan.action_text import parse_actions

TIES: dict[int, list[list[tuple[int, ...]]]] = {
    1: [[]],
    2: [[], [(0, 1)], [(1, 0)]],
    3: [[], [(0, 2)], [(2, 0), (1, 2)]],
    5: [[], [(0, 4), (1, 2, 3)], [(4, 2, 0)]],
}
SHAPES = [
    (shards, microbatches, barrier, send, tuple(tied))
    for shards, microbatches, barrier, send in product(
        (1, 2, 3, 5), (1, 2, 4), (False, True), (False, True)
    )
    for tied in TIES[shards]
]


def plain(
    visit: int, shards: int, microbatches: int, barrier: bool, send: bool = False, tied=()
) -> list[Action]:
    """Return the one window of a visit in the order of plain training."""
    return TaskGraph(shards, microbatches, microbatches, barrier, tuple(tied)).tasks(visit, 0, send)


def holds(actions: list[Action], shards: int, microbatches: int, barrier: bool, tied) -> bool:
    try:
        validate(actions, shards=shards, microbatches=microbatches, barrier=barrier, tied=tied)
    except InvalidSchedule:
        return False
    return True


def breaks_a_precedence(actions, shards, microbatches, barrier, tied) -> bool:
    """Return whether a rule is broken; each rule is a pair of texts, the left one first."""
    last = microbatches - 1
    pairs: set[tuple[str, str]] = set()
    for k, m in product(range(shards), range(microbatches)):
        pairs.add((f"s{k}F{m}", f"s{k}B{m}"))
        pairs.add((f"s{k}B{m}", f"s{k}U{last}"))
        if k:
            pairs |= {(f"s{k - 1}F{m}", f"s{k}F{m}"), (f"s{k}B{m}", f"s{k - 1}B{m}")}
        if m:
            pairs |= {(f"s{k}F{m - 1}", f"s{k}F{m}"), (f"s{k}B{m - 1}", f"s{k}B{m}")}
        if barrier:
            pairs |= {(f"s{k}B{m}", f"s{other}U{last}") for other in range(shards)}
        for group in tied:
            if k in group:
                pairs.add((f"s{k}B{m}", f"s{group[0]}U{last}"))
    for k in range(shards):
        pairs.add((f"s{k}U{last}", f"s{k}SEND"))
    at = {str(action)[2:]: index for index, action in enumerate(actions)}
    return any(a in at and b in at and at[a] > at[b] for a, b in pairs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequential_is_valid_for_every_shape(shape) -> None:
    shards, microbatches, barrier, send, tied = shape
    actions = plain(0, shards, microbatches, barrier, send, tied)
    validate(actions, shards=shards, microbatches=microbatches, barrier=barrier, tied=tied)
    assert len(actions) == shards * (2 * microbatches + 1 + send)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] * s[1] <= 6], ids=str)
def test_every_dropped_or_repeated_action_is_caught(shape) -> None:
    shards, microbatches, barrier, send, tied = shape
    actions = plain(0, shards, microbatches, barrier, send, tied)
    rules = (shards, microbatches, barrier, tied)
    for index, action in enumerate(actions):
        if not (shards == 1 and str(action).endswith("SEND")):  # the only SEND may be left out
            assert not holds(actions[:index] + actions[index + 1 :], *rules)
        for at in range(len(actions) + 1):
            assert not holds([*actions[:at], action, *actions[at:]], *rules)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] * s[1] <= 6], ids=str)
def test_a_swap_is_caught_exactly_if_it_breaks_a_precedence(shape) -> None:
    shards, microbatches, barrier, send, tied = shape
    actions = plain(0, shards, microbatches, barrier, send, tied)
    rules = (shards, microbatches, barrier, tied)
    for i in range(len(actions)):
        for j in range(i):
            swapped = actions.copy()
            swapped[i], swapped[j] = swapped[j], swapped[i]
            assert holds(swapped, *rules) != breaks_a_precedence(swapped, *rules)


def test_tied_weights_wait_for_every_backward_of_their_group() -> None:
    untied = plain(0, 3, 1, barrier=False)
    with pytest.raises(InvalidSchedule, match=r"action 4, t0s2U0: t0s0B0 is missing"):
        validate(untied, shards=3, microbatches=1, barrier=False, tied=[(2, 0)])


def test_a_forward_after_an_update_is_a_mixed_weight_version() -> None:
    actions = parse_actions("t0s0F0 t0s1F0 t0s1B0 t0s0B0 t0s0U0 t0s0F0")
    with pytest.raises(InvalidSchedule, match=r"action 5, t0s0F0: was done before"):
        validate(actions, shards=2, microbatches=1, barrier=False)
    actions = parse_actions("t0s0F0 t0s1F0 t0s1B0 t0s0B0 t0s0U1 t0s0F1")
    with pytest.raises(InvalidSchedule, match="t0s0B1 is missing"):
        validate(actions, shards=2, microbatches=2, barrier=False)


def test_several_trials_are_checked_apart() -> None:
    mixed = [
        a for pair in zip(plain(0, 2, 1, True), plain(7, 2, 1, True), strict=False) for a in pair
    ]
    validate(mixed, shards=2, microbatches=1, barrier=True)
    with pytest.raises(InvalidSchedule, match="t7s1U0 never happens"):
        validate(mixed[:-1], shards=2, microbatches=1, barrier=True)


SPILLED = "t0s0F0 t0s0SPILL t0s1LOAD t0s1F0 t0s1B0 t0s1U0 t0s1SPILL t0s0LOAD t0s0B0 t0s0U0"


def test_shards_are_loaded_before_use_and_bytes_stay_under_the_budget() -> None:
    def check(text: str, budget: int = 10) -> None:
        validate(
            parse_actions(text), shards=2, microbatches=1, barrier=False,
            resident={(0, 0)}, budget=budget, shard_bytes={(0, 0): 10, (0, 1): 8},
        )  # fmt: skip

    check(SPILLED)
    with pytest.raises(InvalidSchedule, match=r"action 2, t0s1F0: the shard is not on the device"):
        check(SPILLED.replace("t0s1LOAD ", ""))
    with pytest.raises(InvalidSchedule, match=r"action 1, t0s1LOAD: 18 bytes.*budget is 10"):
        check(SPILLED.replace("t0s0SPILL ", ""))
    with pytest.raises(InvalidSchedule, match="on the device already"):
        check("t0s0LOAD " + SPILLED)
    with pytest.raises(InvalidSchedule, match="10 bytes are resident at first"):
        check(SPILLED, budget=9)


def test_numbers_beyond_the_shape_are_named() -> None:
    with pytest.raises(InvalidSchedule, match="only 1 shards"):
        validate(parse_actions("t0s1F0"), shards=1, microbatches=1, barrier=False)
    with pytest.raises(InvalidSchedule, match="only 1 microbatches"):
        validate(parse_actions("t0s0F1"), shards=1, microbatches=1, barrier=False)


# ---------------------------------------------------------------------- any schedule


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    shards = draw(st.integers(1, 6))
    groups = st.lists(st.integers(0, shards - 1), min_size=2, max_size=3, unique=True)
    return TaskGraph(
        shards,
        microbatches=draw(st.integers(1, 7)),
        window=draw(st.integers(1, 4)),
        barrier=draw(st.booleans()),
        tied=tuple(map(tuple, draw(st.lists(groups, max_size=shards // 2)))) if shards > 1 else (),
    )


def done_in_turn(
    schedule: Schedule, graph: TaskGraph, devices: int, chance: Random
) -> list[Action]:
    """Do all windows: whichever list's first task is ready by `needs`, as long as there is one."""
    windows = [schedule(graph, 0, window, devices) for window in range(graph.windows)]
    lists = [[task for tasks in each for task in tasks] for each in zip(*windows, strict=True)]
    done: list[Action] = []
    while any(lists):
        ready = [
            tasks
            for tasks in lists
            if tasks and all(need in done for need, _ in graph.needs(tasks[0]))
        ]
        if not ready:
            raise InvalidSchedule(f"stands still before {[str(t[0]) for t in lists if t]}")
        done.append(chance.choice(ready).pop(0))
    return done


@pytest.mark.parametrize("name", FLUSHED)
@settings(max_examples=examples(200))
@given(graphs(), st.integers(1, 5), st.integers(0, 9))
def test_lists_of_a_schedule_have_each_task_once_and_never_stand_still(
    name: str, graph: TaskGraph, devices: int, seed: int
) -> None:
    schedule = FLUSHED[name]
    for window in range(graph.windows):
        lists = schedule(graph, 0, window, devices)
        tasks = [task for each in lists for task in each]
        assert sorted(map(str, tasks)) == sorted(map(str, graph.tasks(0, window)))
        assert len(lists) <= devices
        assert all(lists)
    validate_order(done_in_turn(schedule, graph, devices, Random(seed)), {0: graph})


@settings(max_examples=examples(50))
@given(graphs(), st.integers(1, 5))
def test_the_one_list_of_sequential_obeys_needs_by_itself(graph: TaskGraph, devices: int) -> None:
    windows = [sequential(graph, 0, window, devices) for window in range(graph.windows)]
    assert {len(lists) for lists in windows} == {1}, "so the queues need not ask"
    validate_order([task for (tasks,) in windows for task in tasks], {0: graph})


def test_a_list_that_waits_for_itself_is_noticed() -> None:
    def impatient(graph: TaskGraph, visit: int, window: int, devices: int) -> list[list[Action]]:
        """Update in the middle of a list, though that waits for the device before."""
        lists = [list(tasks) for tasks in gpipe(graph, visit, window, devices)]
        lists[1].insert(2, lists[1].pop())
        return lists

    graph = TaskGraph(2, 2, 2, barrier=True)
    assert done_in_turn(gpipe, graph, 2, Random(0))
    with pytest.raises(InvalidSchedule, match="stands still"):
        done_in_turn(impatient, graph, 2, Random(0))
