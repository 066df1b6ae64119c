"""Computes the row ranges of partitions of existing files from the files' row counts alone.

```
files        a: 5 rows   b: 0   c: 6 rows            three partitions, balanced to within one row
rows         0 1 2 3 4          0 1 2 3 4 5
partition    0 0 0 1 1          1 1 2 2 2 2
```
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.data.manifest import PartitionInfo, RowRange
from cerebro_hydra.data.row_ids import mixed_key, permutation


def split_evenly(rows: int, parts: int) -> list[int]:
    """Split a number of rows into parts that differ by one at most."""
    ends = [rows * part // parts for part in range(parts + 1)]
    return [stop - start for start, stop in pairwise(ends)]


def assign_ranges(
    file_rows: Sequence[int], sizes: Sequence[int], first_file: int = 0
) -> list[list[RowRange]]:
    """Assign the rows of files, in order, to partitions of these sizes, which sum to all rows.

    `first_file` is the number of the first file among all of the data.
    """
    ends = list(accumulate(file_rows, initial=0))
    bounds = list(accumulate(sizes, initial=0))
    ranges: list[list[RowRange]] = []
    file = 0
    for start, stop in pairwise(bounds):
        row_ranges = []
        while start < stop:
            while ends[file + 1] <= start:
                file += 1
            rows = min(stop, ends[file + 1]) - start
            row_ranges.append(RowRange(first_file + file, start - ends[file], rows))
            start += rows
        ranges.append(row_ranges)
    return ranges


def partitions_of(
    train: Sequence[int], validation: Sequence[int], held_back: int, num_partitions: int
) -> tuple[PartitionInfo, ...]:
    """Describe every partition of files with these rows; files of `validation` come last.

    `held_back` training rows are validated on instead: each partition has its share of them, so
    that both of its splits name the same ranges, and `split_mask` tells their rows apart.
    """
    trained = split_evenly(sum(train) - held_back, num_partitions)
    held = split_evenly(held_back, num_partitions)
    ranges = assign_ranges(train, [a + b for a, b in zip(trained, held, strict=True)])
    infos = _infos("train", trained, ranges)
    if held_back:
        infos += _infos("val", held, ranges)
    elif validation:
        sizes = split_evenly(sum(validation), num_partitions)
        infos += _infos("val", sizes, assign_ranges(validation, sizes, len(train)))
    return tuple(infos)


def _infos(
    split: str, sizes: Sequence[int], ranges: Sequence[Sequence[RowRange]]
) -> list[PartitionInfo]:
    return [
        PartitionInfo(split, index, rows, None, "", tuple(row_ranges))
        for index, (rows, row_ranges) in enumerate(zip(sizes, ranges, strict=True))
    ]


def split_mask(info: PartitionInfo, seed: int | None) -> NDArray[np.bool_] | None:
    """Return which rows of a partition's ranges belong to its split, in order; None if all do.

    Where rows are held back, the seed draws those that are validated on; the others train.
    """
    there = sum(row_range.rows for row_range in info.row_ranges)
    if seed is None or there == info.rows:
        return None
    held_back = info.rows if info.split == "val" else there - info.rows
    mask = np.full(there, info.split == "train")
    mask[permutation(there, mixed_key(seed, info.index))[:held_back]] = info.split == "val"
    return mask
