from __future__ import annotations

from itertools import product

import pytest

from cerebro_hydra.errors import InvalidSchedule
from cerebro_hydra.plan.messages.actions import Action, parse_actions
from cerebro_hydra.plan.schedules.sequential import sequential
from cerebro_hydra.plan.schedules.validate import validate

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
    actions = sequential(0, shards, microbatches, barrier, send, tied)
    validate(actions, shards=shards, microbatches=microbatches, barrier=barrier, tied=tied)
    assert len(actions) == shards * (2 * microbatches + 1 + send)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] * s[1] <= 6], ids=str)
def test_every_dropped_or_repeated_action_is_caught(shape) -> None:
    shards, microbatches, barrier, send, tied = shape
    actions = sequential(0, shards, microbatches, barrier, send, tied)
    rules = (shards, microbatches, barrier, tied)
    for index, action in enumerate(actions):
        if not (shards == 1 and str(action).endswith("SEND")):  # the only SEND may be left out
            assert not holds(actions[:index] + actions[index + 1 :], *rules)
        for at in range(len(actions) + 1):
            assert not holds([*actions[:at], action, *actions[at:]], *rules)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] * s[1] <= 6], ids=str)
def test_a_swap_is_caught_exactly_if_it_breaks_a_precedence(shape) -> None:
    shards, microbatches, barrier, send, tied = shape
    actions = sequential(0, shards, microbatches, barrier, send, tied)
    rules = (shards, microbatches, barrier, tied)
    for i in range(len(actions)):
        for j in range(i):
            swapped = actions.copy()
            swapped[i], swapped[j] = swapped[j], swapped[i]
            assert holds(swapped, *rules) != breaks_a_precedence(swapped, *rules)


def test_tied_weights_wait_for_every_backward_of_their_group() -> None:
    untied = sequential(0, 3, 1, barrier=False)
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
        a
        for pair in zip(sequential(0, 2, 1, True), sequential(7, 2, 1, True), strict=False)
        for a in pair
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
