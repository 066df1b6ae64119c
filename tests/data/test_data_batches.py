from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cerebro_hydra.data import batches as read_ahead
from cerebro_hydra.data.batches import (
    batch_sizes,
    batches,
    may_leave_memory,
    num_windows,
    page_runs,
    row_order,
)
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.errors import ConfigurationError, DataError


@given(st.integers(0, 2000), st.integers(1, 300))
def test_batches_cover_the_rows(rows: int, batch_size: int) -> None:
    sizes = batch_sizes(rows, batch_size)
    assert sum(sizes) == rows
    assert all(size == batch_size for size in sizes[:-1])
    assert all(1 <= size <= batch_size + 1 for size in sizes)


@given(st.integers(2, 2000), st.integers(2, 300))
def test_no_batch_of_one_row_unless_there_is_one_row(rows: int, batch_size: int) -> None:
    assert 1 not in batch_sizes(rows, batch_size)


@pytest.mark.parametrize(
    ("rows", "batch_size", "sizes"),
    [
        (0, 4, []),
        (1, 4, [1]),
        (4, 4, [4]),
        (5, 4, [5]),
        (6, 4, [4, 2]),
        (9, 4, [4, 5]),
        (3, 1, [1, 1, 1]),
        (3, 100, [3]),
    ],
)
def test_batch_sizes(rows: int, batch_size: int, sizes: list[int]) -> None:
    assert batch_sizes(rows, batch_size) == sizes


@given(st.integers(0, 500), st.integers(1, 50), st.integers(1, 7))
def test_windows_hold_every_batch_and_are_flushed(rows: int, size: int, accumulate: int) -> None:
    count = len(batch_sizes(rows, size))
    windows = num_windows(rows, size, accumulate)
    assert (windows - 1) * accumulate < count <= windows * accumulate or count == windows == 0


def test_numbers_below_one_are_refused_by_value() -> None:
    with pytest.raises(ConfigurationError, match="batch_size is 0"):
        batch_sizes(10, 0)
    with pytest.raises(ConfigurationError, match="accumulate is -1"):
        num_windows(10, 2, -1)


@given(st.integers(0, 400), st.integers(0, 2**64), st.integers(0, 50), st.integers(0, 50))
def test_order_visits_every_row_once(rows: int, seed: int, epoch: int, partition: int) -> None:
    order = row_order(rows, seed, epoch, partition)
    assert sorted(order.tolist()) == list(range(rows))


def test_order_depends_on_seed_epoch_and_partition() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0)]
    orders = {tuple(row_order(50, *key).tolist()) for key in keys}
    assert len(orders) == len(keys)
    assert row_order(50, 0, 1, 2).tolist() == row_order(50, 0, 1, 2).tolist()


def test_first_rows_of_the_orders_are_spread_evenly() -> None:
    first = np.array([row_order(10, 0, epoch, 0)[0] for epoch in range(2000)])
    counts = np.bincount(first, minlength=10)
    assert counts.min() > 140
    assert counts.max() < 260


def partition(rows: int = 11) -> CachedPartition:
    columns = {
        "image": np.arange(rows * 6, dtype=np.float32).reshape(rows, 2, 3),
        "tokens": np.arange(rows, dtype=np.int64) * 10,
        "flag": np.arange(rows) % 2 == 0,
    }
    return CachedPartition(rows=rows, columns=columns)


def test_stored_order_gives_every_row_in_sequence() -> None:
    part = partition()
    taken = list(batches(part, ["image", "tokens"], ["flag"], 4, None))
    assert [batch.rows for batch in taken] == [4, 4, 3]
    for i, name in enumerate(["image", "tokens"]):
        together = torch.cat([batch.features[i] for batch in taken]).numpy()
        assert together.dtype == part.columns[name].dtype
        np.testing.assert_array_equal(together, part.columns[name])
    flags = torch.cat([batch.labels[0] for batch in taken])
    assert flags.dtype == torch.bool
    np.testing.assert_array_equal(flags.numpy(), part.columns["flag"])


def test_given_order_is_followed_and_the_lone_row_joins() -> None:
    part = partition(9)
    order = row_order(9, 3, 1, 0)
    taken = list(batches(part, ["tokens"], ["tokens"], 4, order))
    assert [batch.rows for batch in taken] == [4, 5]
    assert torch.cat([batch.features[0] for batch in taken]).tolist() == (order * 10).tolist()


def test_tensors_own_their_memory() -> None:
    part = partition()
    first = next(batches(part, ["image"], ["tokens"], 4, None))
    first.features[0].zero_()
    first.labels[0].zero_()
    assert part.columns["image"][1, 0, 0] == 6
    assert part.columns["tokens"][1] == 10


def test_unknown_column_is_named_with_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"'imag'.*'flag', 'image', 'tokens'"):
        next(batches(partition(), ["imag"], ["flag"], 4, None))


@pytest.mark.parametrize("row", [-1, 11])
def test_order_beyond_the_partition_is_refused(row: int) -> None:
    with pytest.raises(DataError, match="11 rows"):
        next(batches(partition(), ["image"], ["flag"], 4, np.array([0, row])))


# ------------------------------------------------------------------ pages that are asked for ahead


ROWS, WIDTH = 3000, 700  # 2.8 kB a row


@given(st.lists(st.integers(0, 40 * mmap.PAGESIZE), max_size=30), st.integers(1, 3 * mmap.PAGESIZE))
def test_runs_are_the_pages_of_all_ranges_each_once_and_in_order(
    starts: list[int], nbytes: int
) -> None:
    wanted = {
        page
        for start in starts
        for page in range(start // mmap.PAGESIZE, (start + nbytes - 1) // mmap.PAGESIZE + 1)
    }
    runs = page_runs(np.array(starts, np.int64), nbytes)
    pages = [page for start, size in runs for page in range(start, start + size, mmap.PAGESIZE)]
    assert [page // mmap.PAGESIZE for page in pages] == sorted(wanted)
    assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(runs))


@pytest.fixture
def part(tmp_path: Path) -> CachedPartition:
    """A partition in files, whose pages are on disk alone."""
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "x": random.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "y": np.arange(ROWS),
    }
    for name, values in columns.items():
        path = tmp_path / f"{name}.npy"
        np.save(path, values)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        columns[name] = np.load(path, mmap_mode="r")
    return CachedPartition(ROWS, columns, reads_ahead=True)


def test_batches_are_the_same_with_pages_asked_for_ahead(part: CachedPartition) -> None:
    order = row_order(ROWS, 7, 0, 0)
    found = list(batches(part, ["x"], ["y"], 64, order))
    plain = CachedPartition(ROWS, part.columns)
    expected = list(batches(plain, ["x"], ["y"], 64, order))
    assert [b.rows for b in found] == [b.rows for b in expected]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.features[0], other.features[0])
        assert torch.equal(one.labels[0], other.labels[0])


def test_rows_of_the_next_batches_are_asked_for_before_they_are_taken(
    part: CachedPartition, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    expect = read_ahead.ReadAhead.expect

    def note(self: Any, rows: Any) -> None:
        asked.extend(rows.tolist())
        expect(self, rows)

    monkeypatch.setattr(read_ahead.ReadAhead, "expect", note)
    order = row_order(ROWS, 7, 0, 0)
    taken = 0
    for batch in batches(part, ["x"], ["y"], 64, order):
        taken += batch.rows
        assert asked == order[: min(ROWS, taken + 4 * 64)].tolist()
    assert taken == len(asked) == ROWS


def test_only_a_partition_that_memory_may_not_keep_is_read_ahead(tmp_path: Path) -> None:
    assert not may_leave_memory(1 << 20)
    assert may_leave_memory(1 << 50)
