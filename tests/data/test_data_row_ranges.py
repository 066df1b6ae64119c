"""Ranges of rows: every row of the files in one partition, balanced to within one row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.data.manifest import PartitionInfo, RowRange
from cerebro_hydra.data.rows import assign_ranges, partitions_of, split_evenly, split_mask

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
