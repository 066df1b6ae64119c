from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.plan.seeds import seed_of

GOLDEN = (3861892292446362340, 471520686603096085, 1631644710169760203)
parts = st.lists(st.integers() | st.text(), max_size=4).map(tuple)


def test_seeds_stay_what_they_were_in_the_first_release() -> None:
    assert seed_of() == GOLDEN[0]
    assert seed_of(0, "trial", 3) == GOLDEN[1]
    assert seed_of(1 << 80, -1, "layer.0@0", "ü") == GOLDEN[2]


@given(parts, parts)
def test_different_parts_give_different_seeds(one: tuple, other: tuple) -> None:
    assert (seed_of(*one) == seed_of(*other)) == (one == other)
    assert 0 <= seed_of(*one) < 2**63


def test_joined_or_retyped_parts_differ() -> None:
    same = {seed_of("ab", "c"), seed_of("a", "bc"), seed_of("abc"), seed_of(1), seed_of("1")}
    assert len(same | {seed_of("i1:1"), seed_of("", "1"), seed_of("1", "")}) == 8


@pytest.mark.parametrize("part", [True, 1.0, b"a", None])
def test_other_types_are_refused(part: object) -> None:
    with pytest.raises(TypeError, match="int or a str"):
        seed_of(part)  # type: ignore[arg-type]
