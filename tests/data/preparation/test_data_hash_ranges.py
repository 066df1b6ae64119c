from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.data.preparation.row_facts import (
    chunk_sums,
    cut_buckets,
    shuffle_keys,
    spark_hash,
)


@st.composite
def rows_and_sizes(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """The rows of each bucket, some of them empty, and the sizes of chunks that take them all."""
    counts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any))
    rows = sum(counts)
    ends = draw(st.sets(st.integers(1, rows), max_size=8)) | {rows}
    sizes = [stop - start for start, stop in zip([0, *sorted(ends)], sorted(ends), strict=False)]
    return counts, sizes, draw(st.integers(0, 5))


def added(rows: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The sums of two hashes, of 64 bits each."""
    return tuple(sum(hashes) % (1 << 64) for hashes in zip((0, 0), *rows, strict=True))


@given(rows_and_sizes())
def test_every_row_goes_to_the_chunk_of_its_place_in_the_order(given) -> None:
    counts, sizes, first = given
    found = []
    for count, cut in zip(counts, cut_buckets(counts, sizes, first), strict=True):
        assert list(cut.ranks) == sorted(set(cut.ranks))
        assert all(0 < rank < count for rank in cut.ranks)  # the others need no look at a row
        found += [cut.chunk + sum(begin <= rank for begin in cut.ranks) for rank in range(count)]
    assert found == [first + i for i, size in enumerate(sizes) for _ in range(size)]


@given(rows_and_sizes())
def test_only_buckets_with_a_border_inside_are_ranked(given) -> None:
    counts, sizes, _ = given
    borders = set(list(accumulate(sizes))[:-1]) - set(accumulate(counts, initial=0))
    cuts = cut_buckets(counts, sizes)
    assert sum(len(cut.ranks) for cut in cuts) == len(borders)


@given(rows_and_sizes(), st.randoms(use_true_random=False))
def test_a_chunks_sums_are_those_of_its_rows(given, random) -> None:
    counts, sizes, first = given
    rows = [[(random.getrandbits(64), random.getrandbits(64)) for _ in range(n)] for n in counts]
    cuts = cut_buckets(counts, sizes, first)
    before = {(i, rank): added(rows[i][:rank]) for i, cut in enumerate(cuts) for rank in cut.ranks}
    in_order = iter(row for bucket in rows for row in bucket)
    expected = {first + i: (n, added(islice(in_order, n))) for i, n in enumerate(sizes)}
    assert chunk_sums(counts, [added(bucket) for bucket in rows], cuts, before) == expected


@pytest.mark.parametrize("sizes", [[3, 3], [7], [8, 0], []])
def test_sizes_of_other_rows_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="8 rows can't fill chunks"):
        cut_buckets([5, 3], sizes)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 933211791), (1, -559580957), (42, 29417773), (-1, -1604776387)]
)
def test_hash_is_that_of_spark(value: int, expected: int) -> None:
    assert spark_hash(value) == expected


@given(st.integers(1, 300))
def test_each_of_sparks_partitions_gets_one_key(partitions: int) -> None:
    keys = shuffle_keys(partitions)
    assert [spark_hash(key) % partitions for key in keys] == list(range(partitions))
