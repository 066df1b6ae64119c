"""Splits a list of costs into balanced, contiguous groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf


def balance(
    costs: Sequence[float],
    groups: int,
    fits: Callable[[int, int], bool] = lambda start, end: True,
) -> list[range]:
    """Split ``costs`` into contiguous, non-empty ranges of indices, minimising the largest sum.

    Among equally good splits it returns the one with the earliest cuts, so that the answer is the
    same everywhere. It is an exact dynamic programme over (items, groups), O(groups * n**2). No
    range is taken that does not fit, by its start and end.

    Raises:
        ValueError: ``groups`` is not between 1 and ``len(costs)``, a cost is negative or NaN, or
            no split has ranges that all fit.
    """
    if not 1 <= groups <= len(costs):
        raise ValueError(
            f"{len(costs)} costs can't be split into {groups} non-empty groups; "
            f"choose between 1 and {len(costs)} groups"
        )
    for index, cost in enumerate(costs):
        if not cost >= 0:
            raise ValueError(f"cost {index} is {cost!r}; give a number that is not negative")

    n = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    # tail[i] is the smallest possible largest sum when costs[i:] is split into the groups so far,
    # and cuts[g][i] is where the first of these groups ends.
    tail = [prefix[n] - prefix[i] if fits(i, n) else inf for i in range(n)]
    cuts = [[n] * n]
    for group in range(1, groups):
        better, ends = [inf] * n, [n] * n
        for i in range(n - group):
            for end in range(i + 1, n - group + 1):
                largest = max(prefix[end] - prefix[i], tail[end])
                if largest < better[i] and fits(i, end):
                    better[i], ends[i] = largest, end
        tail = better
        cuts.append(ends)

    if tail[0] == inf:
        raise ValueError(f"no split of {n} costs into {groups} groups fits; choose more groups")
    split: list[range] = []
    start = 0
    for ends in reversed(cuts):
        split.append(range(start, ends[start]))
        start = ends[start]
    return split
