"""Cuts a list of costs into balanced groups, by seconds, or by bytes where a device has few.

Shards are contiguous ranges of units, so an exact dynamic programme finds the best cut: the
recurrence of PipeDream's partitioner (Narayanan et al., "PipeDream: Generalized Pipeline
Parallelism for DNN Training", SOSP 2019, section 3.1) without replication. A range that does not
fit a device is no shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.human_units import bytes_text, needed_text
from cerebro_hydra.plan.queues.visit_spec import ShardSpec


def auto_cut(
    names: Sequence[str],
    units: Sequence[ShardSpec],
    budget: int | None,
    *,
    by_modules: bool = False,
    buffers: int = 2,
    least: int = 1,
) -> list[range]:
    """Return the units of each shard.

    A shard fits a device if ``buffers`` times its state, its activations, and the boundary values
    that a microbatch keeps there are within the budget: while it computes, a shard of its size is
    brought. The result is `cut_by_bytes` into the fewest shards that do.

    Args:
        names: what a message should call each unit.
        units: the units of the model in their order, each as if it were a shard.
        budget: the bytes of a device; None means no limit.
        by_modules: the model is cut by modules, where every unit keeps its input to run again.
        buffers: how many shards a device has room for; 1 without double buffering.
        least: how many shards there are to be, even where fewer would fit.

    Raises:
        ConfigurationError: a unit does not fit; the message names it and says what to change.
    """
    if budget is None:
        return [range(len(units))]
    kept = sum(unit.boundary for unit in units)
    for shards in range(least, len(units) + 1):
        if not by_modules:
            kept = _boundaries(units, shards)
        ends = _longest_that_fit(units, budget - kept, buffers)
        if _fewest(ends) <= shards:
            return cut_by_bytes(units, shards, buffers)
    raise ConfigurationError(_refusal(names, units, budget, kept, buffers))


def cut_by_bytes(units: Sequence[ShardSpec], shards: int, buffers: int = 2) -> list[range]:
    """Return the units of each shard, where a device has less than the trial needs.

    No cut into so many shards needs less for its largest one: ``buffers`` times its state, and its
    activations. Of those that need no more, the result has the shortest longest shard.
    """
    needs = [_need(unit, buffers) for unit in units]
    largest = max(sum(needs[i] for i in part) for part in balance(needs, shards))
    ends = _longest_that_fit(units, largest, buffers)
    seconds = [unit.forward + unit.backward for unit in units]
    return balance(seconds, shards, partial(_is_within, ends))


def _is_within(ends: Sequence[int], start: int, end: int) -> bool:
    return end <= ends[start]


def _boundaries(units: Sequence[ShardSpec], shards: int) -> int:
    """Return the most bytes that the boundary values of so many shards can have."""
    later = sorted((unit.boundary for unit in units[1:]), reverse=True)
    return units[0].boundary + sum(later[: shards - 1])


def _need(unit: ShardSpec, buffers: int) -> int:
    return buffers * unit.state + unit.activations


def _longest_that_fit(units: Sequence[ShardSpec], free: int, buffers: int) -> list[int]:
    """Return for each unit where the longest shard that begins there and fits has its end."""
    ends: list[int] = []
    end = used = 0
    for start, first in enumerate(units):
        while end < len(units) and used + _need(units[end], buffers) <= free:
            used += _need(units[end], buffers)
            end += 1
        ends.append(end)
        if end > start:
            used -= _need(first, buffers)
        else:
            end = start + 1
    return ends


def _fewest(ends: Sequence[int]) -> float:
    """Return the fewest shards, which are as long as they can be; infinity if a unit is too big."""
    shards = start = 0
    while start < len(ends):
        if ends[start] == start:
            return math.inf
        start = ends[start]
        shards += 1
    return shards


def _refusal(
    names: Sequence[str], units: Sequence[ShardSpec], budget: int, kept: int, buffers: int
) -> str:
    largest = max(range(len(units)), key=lambda number: _need(units[number], buffers))
    unit = units[largest]
    need = needed_text(_need(unit, buffers) + kept)
    parts = [
        f"{buffers} x {bytes_text(unit.state)} of state",
        f"{bytes_text(unit.activations)} of activations",
    ]
    if kept:
        parts.append(f"{bytes_text(kept)} of boundary values")
    return (
        f"module {names[largest]!r} needs {need} of a device ({', '.join(parts)}), and "
        f"device_memory is {bytes_text(budget)}; give the devices at least {need}, use "
        "smaller microbatches, or make the module smaller"
    )


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
