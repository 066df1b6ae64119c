"""Automatic cuts against every cut that there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.protocol.resources import WorkerResources
from cerebro_hydra.plan.human_units import bytes_text, needed_text, seconds_text
from cerebro_hydra.plan.queues.visit_spec import ShardSpec, VisitSpec
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.plan.sizing.cuts import auto_cut, cut_by_bytes

MIB = 2**20


def unit(seconds: float = 1.0, state: int = 8, activations: int = 0, boundary: int = 0):
    return ShardSpec(state, activations, boundary, seconds, 2 * seconds)


def shard_of(units: Sequence[ShardSpec]) -> ShardSpec:
    """The shard that these units make."""
    return ShardSpec(
        state=sum(unit.state for unit in units),
        activations=sum(unit.activations for unit in units),
        boundary=units[0].boundary,
        forward=sum(unit.forward for unit in units),
        backward=sum(unit.backward for unit in units),
        update=sum(unit.update for unit in units),
        forward_writes=any(unit.forward_writes for unit in units),
    )


def cut_of(units: list[ShardSpec], budget: int | None, **options) -> list[range]:
    return auto_cut([f"block {n}" for n in range(len(units))], units, budget, **options)


units_of_a_model = st.lists(
    st.builds(
        unit,
        st.integers(1, 9).map(float),
        st.integers(0, 20),
        st.integers(0, 9),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=7,
)


def cuts_of(count: int, shards: int) -> list[list[range]]:
    chosen = combinations(range(1, count), shards - 1)
    return [[range(a, b) for a, b in pairwise((0, *cut, count))] for cut in chosen]


def largest(units: list[ShardSpec], cut: list[range], buffers: int) -> tuple[int, float]:
    """Return the bytes of the largest shard, then the seconds of the longest one."""
    shards = [shard_of([units[i] for i in part]) for part in cut]
    nbytes = max(buffers * shard.state + shard.activations for shard in shards)
    return nbytes, max(shard.forward + shard.backward for shard in shards)


@given(units_of_a_model, st.integers(1, 2), st.data())
def test_no_cut_by_bytes_has_a_smaller_largest_shard_or_an_as_small_one_and_a_shorter_longest(
    units: list[ShardSpec], buffers: int, data: st.DataObject
) -> None:
    shards = data.draw(st.integers(1, len(units)))
    cut = cut_by_bytes(units, shards, buffers)
    others = [largest(units, other, buffers) for other in cuts_of(len(units), shards)]
    assert largest(units, cut, buffers) == min(others)


def test_layers_of_unlike_sizes_make_shards_of_like_ones() -> None:
    kib = [9, 113, 113, 113, 113, 5]
    units = [unit(state=n << 10) for n in kib]
    parts = [sum(kib[i] for i in part) for part in cut_by_bytes(units, 4)]
    assert parts == [122, 113, 113, 118]


@given(units_of_a_model, st.integers(0, 120), st.booleans(), st.integers(1, 2))
def test_no_cut_that_fits_has_fewer_shards_or_a_smaller_largest_one(
    units: list[ShardSpec], budget: int, by_modules: bool, buffers: int
) -> None:
    if not by_modules:  # blocks of a model have equal boundaries; else the rule is on the safe side
        units = [replace(each, boundary=2) for each in units]

    def fits(cut: list[range]) -> bool:
        shards = [shard_of([units[i] for i in part]) for part in cut]
        kept = sum(each.boundary for each in (units if by_modules else shards))
        return all(buffers * s.state + s.activations + kept <= budget for s in shards)

    for shards in range(1, len(units) + 1):
        fitting = [cut for cut in cuts_of(len(units), shards) if fits(cut)]
        if fitting:
            cut = cut_of(units, budget, by_modules=by_modules, buffers=buffers)
            assert len(cut) == shards and fits(cut)
            assert largest(units, cut, buffers) == min(largest(units, c, buffers) for c in fitting)
            return
    with pytest.raises(ConfigurationError, match=r"module 'block \d' needs"):
        cut_of(units, budget, by_modules=by_modules, buffers=buffers)


def test_a_cut_that_fits_passes_through_its_device() -> None:
    units = [unit(n + 1.0, 10, 3, 1) for n in range(9)]
    cut = cut_of(units, 70)
    shards = tuple(shard_of([units[i] for i in part]) for part in cut)
    run = VisitSpec(0, TaskGraph(len(shards), 1), shards, by_modules=True)
    assert run.device_need < run.buffered_need(2) <= 70 and len(cut) == 5
    assert len(cut_of(units, 70, least=7)) == 7


def test_without_a_budget_a_model_stays_whole() -> None:
    assert cut_of([unit(), unit()], None) == [range(0, 2)]


def test_the_unit_that_can_not_fit_is_named_with_what_to_change() -> None:
    units = [unit(state=4 * MIB), unit(state=40 * MIB, activations=6 * MIB)]
    with pytest.raises(ConfigurationError) as refused:
        cut_of(units, 64 * MIB)
    assert str(refused.value) == (
        "module 'block 1' needs 86.0 MiB of a device (2 x 40.0 MiB of state, 6.00 MiB of "
        "activations), and device_memory is 64.0 MiB; give the devices at least 86.0 MiB, use "
        "smaller microbatches, or make the module smaller"
    )
    assert cut_of(units, 64 * MIB, buffers=1) == [range(0, 2)]


def test_bytes_that_are_told_as_needed_are_enough() -> None:
    for need in (1, 1023, 1025, 499_712, 500_001, 10 * MIB + 1, 100 * MIB - 1, 1024 * MIB - 1):
        told = needed_text(need)
        given = WorkerResources.checked(1, told, told, None, "auto").device_memory
        assert given is not None and need <= given <= 1.01 * need + 1, told
    assert needed_text(488 * 1024) == bytes_text(488 * 1024) == "488 KiB"


def test_a_model_of_a_hundred_units_is_cut_at_once() -> None:
    units = [unit(1.0 + n % 7, 100, 10, 5) for n in range(100)]
    cut = cut_of(units, 900, by_modules=True)
    assert [i for part in cut for i in part] == list(range(100))


def test_bytes_and_seconds_are_written_for_people() -> None:
    assert [bytes_text(n) for n in (5, 1536, 20 * MIB, 300 * MIB, float("inf"))] == [
        "5 B", "1.50 KiB", "20.0 MiB", "300 MiB", "no limit",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (0.25, 42.0, 600.0, 9000.0)] == [
        "0.2 s",
        "42 s",
        "10 min",
        "2.5 h",
    ]
