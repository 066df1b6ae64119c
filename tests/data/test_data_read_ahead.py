"""Pages of rows are asked for before their batch is made, where memory may not hold a partition."""

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
from cerebro_hydra.data.batches import batches, may_leave_memory, page_runs, row_order
from cerebro_hydra.data.partition import CachedPartition

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
