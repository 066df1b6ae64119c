"""Rows by their numbers: each in one partition, balanced, and seen if it is lost or changed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cerebro_hydra.data.manifest import PartitionInfo, RowRange
from cerebro_hydra.data.rows import (
    AffinePermutation,
    Assignment,
    ContentDigest,
    assign_ranges,
    checksum,
    mix64,
    mixed_key,
    partitions_of,
    permutation,
    row_hashes,
    split_evenly,
    split_mask,
)
from cerebro_hydra.errors import DataError

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


# ------------------------------------------------------------------ assignment


@given(st.integers(1, 3000), st.integers(0, 2**64))
def test_affine_map_is_a_bijection(rows: int, seed: int) -> None:
    affine = AffinePermutation.drawn(rows, seed)
    assert sorted(map(affine, range(rows))) == list(range(rows))


@given(st.integers(1, 2**50), st.integers(0, 2**64))
def test_affine_map_stays_within_sparks_long_integers(rows: int, seed: int) -> None:
    affine = AffinePermutation.drawn(rows, seed)
    assert 0 <= affine.multiplier * (rows - 1) + affine.offset < 2**63


def test_affine_maps_of_two_seeds_differ() -> None:
    assert len({AffinePermutation.drawn(10_007, seed) for seed in range(50)}) == 50


@st.composite
def assignments(draw: st.DrawFn) -> Assignment:
    count = draw(st.integers(1, 9))
    train = draw(st.integers(count, 400))
    has_validation = draw(st.booleans())
    val = draw(st.integers(count, 200)) if has_validation else 0
    return Assignment(train + val, val, count, has_validation)


@given(assignments())
def test_every_row_lies_in_one_partition(assignment: Assignment) -> None:
    infos = assignment.partitions("attempt")
    ids = [i for info in infos for i in assignment.ids(info.split, info.index)]
    assert sorted(ids) == list(range(assignment.rows))
    held_back = [
        i for info in infos if info.split == "val" for i in assignment.ids("val", info.index)
    ]
    assert sorted(held_back) == list(range(assignment.validation_rows))


@given(assignments())
def test_partitions_of_a_split_are_balanced_to_within_one_row(assignment: Assignment) -> None:
    infos = assignment.partitions("attempt")
    for split in {info.split for info in infos}:
        rows = [info.rows for info in infos if info.split == split]
        assert len(rows) == assignment.num_partitions
        assert 0 <= max(rows) - min(rows) <= 1
        assert min(rows) >= 1


@given(assignments())
def test_checksums_are_those_of_the_ids(assignment: Assignment) -> None:
    for info in assignment.partitions("attempt"):
        ids = np.array(assignment.ids(info.split, info.index))
        assert info.checksum == checksum(ids)
        assert info.rows == len(ids)


def test_partition_without_rows_is_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match="2 training rows are fewer than 3 partitions"):
        Assignment(8, 6, 3, True)
    with pytest.raises(DataError, match="1 validation rows are fewer than 2 partitions"):
        Assignment(8, 1, 2, True)


# ------------------------------------------------------------------ ranges of files


FILES = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def rows_of(info: PartitionInfo, seed: int | None) -> list[tuple[int, int]]:
    """(file, row) of every row of a partition."""
    there = [(p.file, p.first + i) for p in info.row_ranges for i in range(p.rows)]
    chosen = split_mask(info, seed)
    return (
        there
        if chosen is None
        else [row for row, is_own in zip(there, chosen, strict=True) if is_own]
    )


@given(rows=st.integers(0, 10**15), parts=st.integers(1, 50))
def test_shares_sum_up_and_differ_by_one_at_most(rows: int, parts: int) -> None:
    found = split_evenly(rows, parts)
    assert len(found) == parts
    assert sum(found) == rows
    assert max(found) - min(found) <= 1


def test_ranges_go_on_over_files_and_skip_empty_ones() -> None:
    assert assign_ranges([5, 0, 6], [4, 4, 3], first_file=2) == [
        [RowRange(2, 0, 4)],
        [RowRange(2, 4, 1), RowRange(4, 0, 3)],
        [RowRange(4, 3, 3)],
    ]


@given(train=FILES, val=st.lists(st.integers(0, 40), max_size=4), parts=st.integers(1, 9))
def test_every_row_of_every_file_is_in_one_partition(
    train: list[int], val: list[int], parts: int
) -> None:
    infos = partitions_of(train, val, 0, parts)
    expected = {"train": [(f, r) for f, n in enumerate(train) for r in range(n)]}
    if val:
        expected["val"] = [(len(train) + f, r) for f, n in enumerate(val) for r in range(n)]
    for split, rows in expected.items():
        own = [info for info in infos if info.split == split]
        assert [info.index for info in own] == list(range(parts))
        # In order, so that this is equality of lists, not of sets.
        assert [row for info in own for row in rows_of(info, None)] == rows
        counts = [info.rows for info in own]
        assert counts == [len(rows_of(info, None)) for info in own]
        assert max(counts) - min(counts) <= 1
    assert {info.split for info in infos} == set(expected)


@given(train=FILES, share=st.floats(0.01, 0.99), parts=st.integers(1, 6), seed=st.integers(0, 9))
def test_held_back_rows_are_the_others_of_their_partition(
    train: list[int], share: float, parts: int, seed: int
) -> None:
    held_back = max(1, round(sum(train) * share))
    if sum(train) < held_back:
        return
    infos = partitions_of(train, [], held_back, parts)
    by_split = {
        split: [rows_of(info, seed) for info in infos if info.split == split]
        for split in ("train", "val")
    }
    everything = [(f, r) for f, n in enumerate(train) for r in range(n)]
    assert sum(map(len, by_split["val"])) == held_back
    for rows in by_split.values():
        counts = [len(each) for each in rows]
        assert max(counts) - min(counts) <= 1
    together = [a + b for a, b in zip(by_split["train"], by_split["val"], strict=True)]
    assert [row for part in together for row in sorted(part)] == everything
    for info in infos:
        assert info.rows == len(rows_of(info, seed))


def test_what_is_held_back_is_drawn_and_not_every_nth() -> None:
    """Rows in a cycle of classes would otherwise give one class alone."""
    (_, val) = partitions_of([1000], [], 200, 1)
    rows = np.array([row for _, row in rows_of(val, 0)])
    classes = np.bincount(rows % 5, minlength=5)
    assert classes.min() > 20
    assert np.abs(rows.mean() - 500) < 60
    assert rows.tolist() != [row for _, row in rows_of(val, 1)]
    assert rows.tolist() == [row for _, row in rows_of(val, 0)]


# ------------------------------------------------------------------ content


RANDOM = np.random.default_rng(0)
ROWS = 300
COLUMNS = {
    "floats": RANDOM.normal(size=(ROWS, 5)).astype(np.float32),
    "ints": RANDOM.integers(-(2**63), 2**63 - 1, ROWS),
    "flags": RANDOM.integers(0, 2, (ROWS, 3)).astype(bool),
    "grid": RANDOM.integers(0, 9, (ROWS, 2, 3)),
}
IDS = np.arange(5, 5 + 3 * ROWS, 3)


def digest(values: NDArray, ids: NDArray = IDS) -> int:
    total = ContentDigest(1)
    total.add(ids, [values])
    return total.digests[0]


@pytest.mark.parametrize("name", COLUMNS)
def test_neither_order_nor_blocks_of_rows_matter(name: str) -> None:
    values, order = COLUMNS[name], RANDOM.permutation(ROWS)
    total = ContentDigest(2)
    for part in np.array_split(order, 7):
        total.add(IDS[part], [values[part], COLUMNS["ints"][part]])
    assert total.digests == (digest(values), digest(COLUMNS["ints"]))


@pytest.mark.parametrize("name", COLUMNS)
@given(st.data())
def test_every_flipped_bit_shows(name: str, data: st.DataObject) -> None:
    flipped = COLUMNS[name].copy()
    byte = data.draw(st.integers(0, flipped.nbytes - 1))
    bit = 1 if name == "flags" else 1 << data.draw(st.integers(0, 7))
    flipped.view(np.uint8).reshape(-1)[byte] ^= bit
    assert digest(flipped) != digest(COLUMNS[name])


@pytest.mark.parametrize("name", ["floats", "ints", "grid"])
def test_exchanges_show(name: str) -> None:
    values = COLUMNS[name]
    rows = values.copy()
    rows[[3, 200]] = rows[[200, 3]]
    assert digest(rows) != digest(values)
    flat = values.reshape(ROWS, -1).copy()
    if flat.shape[1] > 1:
        places = np.flatnonzero(flat[7] != flat[7, 0])[:1]
        flat[7, 0], flat[7, places] = flat[7, places[0]], flat[7, 0]
        assert digest(flat) != digest(values)


def test_rows_without_their_ids_show() -> None:
    shifted = IDS.copy()
    shifted[-1] += 1
    assert digest(COLUMNS["floats"], shifted) != digest(COLUMNS["floats"])


def test_sign_of_zero_and_two_signs_show() -> None:
    zeros = np.zeros((2, 64), np.float32)
    negative = zeros.copy()
    negative[0, 3] = -0.0
    assert digest(negative, IDS[:2]) != digest(zeros, IDS[:2])
    hashes = set()
    for first in range(64):
        for second in range(first):
            both = zeros.copy()
            both[0, [first, second]] = -0.0
            hashes.add(int(row_hashes(both)[0]))
    assert len(hashes) == 64 * 63 // 2


def test_hash_of_a_row_is_the_same_everywhere() -> None:
    """Manifests outlive versions: another hash needs another FORMAT."""
    values = np.array([[1.5, -2.0], [0.0, 3.0]], np.float32)
    assert digest(values, np.array([0, 7])) == 0xF2A32945CB1DFEEA


def test_wide_rows_are_hashed_in_blocks() -> None:
    wide = RANDOM.normal(size=(3, 40_000)).astype(np.float32)
    assert [int(each) for each in row_hashes(wide)] == [
        int(row_hashes(row[None])[0]) for row in wide
    ]
