"""Cuts a model into the fewest shards that fit a device, balanced by time (``shards="auto"``).

Shards are contiguous ranges of units, so an exact dynamic programme finds the best cut: the
recurrence of PipeDream's partitioner (Narayanan et al., "PipeDream: Generalized Pipeline
Parallelism for DNN Training", SOSP 2019, section 3.1) without replication. A range that does not
fit a device is no shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.balance import balance
from cerebro_hydra.plan.human_units import bytes_text
from cerebro_hydra.plan.run_progress import ShardSpec


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """Holds what one unit of a model was measured to take.

    Args:
        name: the unit, as a message should name it.
        forward, backward, update: seconds of one microbatch, and of one optimizer step.
        parameters: bytes of parameters and buffers.
        gradients: bytes of gradients; 0 for a frozen unit.
        optimizer: bytes of optimizer state.
        boundary: bytes of one microbatch's input and of its gradient, if a shard begins here.
        saved: bytes that a forward of one microbatch saves for its backward.
        forward_writes: whether a forward changes buffers, as BatchNorm's statistics do.
    """

    name: str
    forward: float
    backward: float
    parameters: int
    gradients: int
    optimizer: int
    boundary: int
    saved: int
    update: float = 0.0
    forward_writes: bool = False

    @property
    def state(self) -> int:
        """Return the bytes that move between the tiers."""
        return self.parameters + self.gradients + self.optimizer


def shard_of(units: Sequence[UnitProfile]) -> ShardSpec:
    """Return the shard that these units make."""
    return ShardSpec(
        state=sum(unit.state for unit in units),
        activations=sum(unit.saved for unit in units),
        boundary=units[0].boundary,
        forward=sum(unit.forward for unit in units),
        backward=sum(unit.backward for unit in units),
        update=sum(unit.update for unit in units),
        forward_writes=any(unit.forward_writes for unit in units),
    )


def auto_cut(
    units: Sequence[UnitProfile],
    budget: int | None,
    *,
    by_modules: bool = False,
    buffers: int = 2,
) -> list[range]:
    """Return the units of each shard.

    A shard fits a device if ``buffers`` times its state, its saved activations, and the boundary
    values that a microbatch keeps there are within the budget: while it computes, a shard of its
    size is brought. Of the cuts with the fewest shards, the result has the shortest longest shard.

    Args:
        units: the units of the model in their order.
        budget: the bytes of a device; None means no limit.
        by_modules: a microbatch keeps its boundary values on its device.
        buffers: how many shards a device has room for; 1 without double buffering.

    Raises:
        ConfigurationError: a unit does not fit; the message names it and says what to change.
    """
    if budget is None:
        return [range(len(units))]
    kept = 0
    for shards in range(1, len(units) + 1):
        if by_modules:
            kept = _boundaries(units, shards)
        ends = _longest_that_fit(units, budget - kept, buffers)
        if _fewest(ends) <= shards:
            costs = [unit.forward + unit.backward for unit in units]
            return balance(costs, shards, partial(_is_within, ends))
    raise ConfigurationError(_refusal(units, budget, kept, buffers))


def _is_within(ends: Sequence[int], start: int, end: int) -> bool:
    return end <= ends[start]


def _boundaries(units: Sequence[UnitProfile], shards: int) -> int:
    """Return the most bytes that the boundary values of so many shards can have."""
    later = sorted((unit.boundary for unit in units[1:]), reverse=True)
    return units[0].boundary + sum(later[: shards - 1])


def _need(unit: UnitProfile, buffers: int) -> int:
    return buffers * unit.state + unit.saved


def _longest_that_fit(units: Sequence[UnitProfile], room: int, buffers: int) -> list[int]:
    """Return for each unit where the longest shard that begins there and fits has its end."""
    ends: list[int] = []
    end = used = 0
    for start, first in enumerate(units):
        while end < len(units) and used + _need(units[end], buffers) <= room:
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


def _refusal(units: Sequence[UnitProfile], budget: int, kept: int, buffers: int) -> str:
    largest = max(units, key=lambda unit: _need(unit, buffers))
    need = _need(largest, buffers) + kept
    parts = [
        f"{buffers} x {bytes_text(largest.state)} of state",
        f"{bytes_text(largest.saved)} of saved activations",
    ]
    if kept:
        parts.append(f"{bytes_text(kept)} of boundary values")
    return (
        f"unit {largest.name!r} needs {bytes_text(need)} of a device ({', '.join(parts)}), and "
        f"device_memory is {bytes_text(budget)}; give the devices at least {bytes_text(need)}, use "
        "smaller microbatches, or make the module smaller"
    )
