from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.data.rows import checksum, mix64, mixed_key, permutation

MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@given(st.lists(st.integers(0, MASK), max_size=50))
def test_mix_is_splitmix64(values: list[int]) -> None:
    mixed = mix64(np.array(values, dtype=np.uint64))
    assert mixed.tolist() == [splitmix64(value) for value in values]


def test_mix_of_zero_is_the_published_first_number() -> None:
    assert mix64(np.zeros(1, np.uint64))[0] == 0xE220A8397B1DCDAF


@given(st.lists(st.integers(0, 2**62), max_size=200), st.randoms())
def test_checksum_does_not_depend_on_order(ids: list[int], random) -> None:
    shuffled = random.sample(ids, len(ids))
    expected = sum(map(splitmix64, ids)) & MASK
    assert checksum(np.array(ids, np.int64)) == checksum(np.array(shuffled, np.int64)) == expected


def test_checksum_of_a_range_equals_that_of_its_numbers() -> None:
    ids = range(5, 3_000_000, 2)
    assert checksum(ids) == checksum(np.arange(5, 3_000_000, 2))


@given(st.integers(2, 200), st.data())
def test_checksum_sees_a_loss_hidden_by_a_duplicate(rows: int, data: st.DataObject) -> None:
    ids = np.arange(rows)
    lost, doubled = data.draw(st.permutations(range(rows)))[:2]
    damaged = ids.copy()
    damaged[lost] = doubled
    assert checksum(damaged) != checksum(ids)


@given(st.integers(0, 500), st.integers(-(2**70), 2**70))
def test_permutation_visits_every_row_once(rows: int, key: int) -> None:
    order = permutation(rows, key)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(rows))


def test_permutation_is_the_same_on_every_machine() -> None:
    assert permutation(8, mixed_key(0, 0, 0)).tolist() == sorted(
        range(8), key=lambda i: splitmix64((mixed_key(0, 0, 0) + i) & MASK)
    )


@given(st.lists(st.integers(-100, 100), min_size=1, max_size=4))
def test_key_depends_on_order_and_number_of_parts(parts: list[int]) -> None:
    assert mixed_key(*parts) == mixed_key(*parts)
    assert mixed_key(*parts) != mixed_key(*parts, 0)
    if parts[0] != parts[-1]:
        assert mixed_key(*parts) != mixed_key(*reversed(parts))
