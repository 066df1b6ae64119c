from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.plan.sizing.cuts import balance


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_no_contiguous_split_has_a_smaller_largest_group(costs: list[int], data) -> None:
    groups = data.draw(st.integers(1, len(costs)))
    split = balance(costs, groups)
    assert [i for part in split for i in part] == list(range(len(costs)))
    assert len(split) == groups and all(len(part) for part in split)

    def largest(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, len(costs))
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    best = min(largest(cuts) for cuts in combinations(range(1, len(costs)), groups - 1))
    assert max(sum(costs[i] for i in part) for part in split) == best


def test_equal_costs_are_split_the_same_everywhere() -> None:
    assert balance([1, 1, 1, 1, 1], 2) == [range(0, 2), range(2, 5)]


@pytest.mark.parametrize(("costs", "groups"), [([], 1), ([1], 2), ([1], 0)])
def test_impossible_numbers_of_groups_are_refused(costs: list[float], groups: int) -> None:
    with pytest.raises(ValueError, match="non-empty groups"):
        balance(costs, groups)


def test_a_cost_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="cost 1 is nan"):
        balance([1.0, float("nan")], 1)
