"""Which rows of existing files make up which partition: a pure function of the files' row counts.

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

from cerebro_hydra.data.manifest import PartitionInfo, Piece
from cerebro_hydra.data.row_ids import mixed_key, permutation


def shares(rows: int, parts: int) -> list[int]:
    """Split a number of rows so that no two parts differ by more than one."""
    ends = [rows * part // parts for part in range(parts + 1)]
    return [stop - start for start, stop in pairwise(ends)]


def cut(file_rows: Sequence[int], sizes: Sequence[int], first_file: int = 0) -> list[list[Piece]]:
    """Deal the rows of files, in order, to ranges of these sizes, which sum to all rows.

    `first_file` is the number of the first file among all of the data.
    """
    ends = list(accumulate(file_rows, initial=0))
    bounds = list(accumulate(sizes, initial=0))
    ranges: list[list[Piece]] = []
    file = 0
    for start, stop in pairwise(bounds):
        pieces = []
        while start < stop:
            while ends[file + 1] <= start:
                file += 1
            rows = min(stop, ends[file + 1]) - start
            pieces.append(Piece(first_file + file, start - ends[file], rows))
            start += rows
        ranges.append(pieces)
    return ranges


def partitions_of(
    train: Sequence[int], validation: Sequence[int], held_back: int, num_partitions: int
) -> tuple[PartitionInfo, ...]:
    """Describe every partition of files with these rows; those of `validation` come after.

    `held_back` training rows are validated on instead: each partition's range has its share of
    them, so that both of its splits name the same pieces, and `is_chosen` tells their rows apart.
    """
    trained = shares(sum(train) - held_back, num_partitions)
    held = shares(held_back, num_partitions)
    ranges = cut(train, [a + b for a, b in zip(trained, held, strict=True)])
    infos = [
        PartitionInfo("train", index, rows, None, "", tuple(pieces))
        for index, (rows, pieces) in enumerate(zip(trained, ranges, strict=True))
    ]
    if held_back:
        validated, others = held, ranges
    elif validation:
        validated = shares(sum(validation), num_partitions)
        others = cut(validation, validated, len(train))
    else:
        return tuple(infos)
    infos += [
        PartitionInfo("val", index, rows, None, "", tuple(pieces))
        for index, (rows, pieces) in enumerate(zip(validated, others, strict=True))
    ]
    return tuple(infos)


def is_chosen(info: PartitionInfo, seed: int | None) -> NDArray[np.bool_] | None:
    """Which rows of a partition's pieces are its own, in order; None if all are.

    Of the rows that hold validation back, a seeded choice is validated on, the others trained on.
    """
    there = sum(piece.rows for piece in info.pieces)
    if seed is None or there == info.rows:
        return None
    held_back = info.rows if info.split == "val" else there - info.rows
    chosen = np.full(there, info.split == "train")
    chosen[permutation(there, mixed_key(seed, info.index))[:held_back]] = info.split == "val"
    return chosen
