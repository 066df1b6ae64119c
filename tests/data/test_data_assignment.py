from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.data.rows import AffinePermutation, Assignment, checksum
from cerebro_hydra.errors import DataError


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
