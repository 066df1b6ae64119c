"""Assigns rows to partitions, balanced to within one row; orders and digests them.

Rows that we prepare go by their ids, those of existing files by the files' row counts alone:

```
files        a: 5 rows   b: 0   c: 6 rows            three partitions, balanced to within one row
rows         0 1 2 3 4          0 1 2 3 4 5
partition    0 0 0 1 1          1 1 2 2 2 2
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.data.manifest import PartitionInfo, RowRange, partition_path
from cerebro_hydra.errors import DataError
from cerebro_hydra.storage.digest import short_digest

_MASK = (1 << 64) - 1
_CHUNK = 1 << 20  # bounds the memory of a checksum over a range of any length

_BLOCK = 1 << 14  # rows, or words, that are hashed at once and stay in the processor's cache


@dataclass(frozen=True)
class AffinePermutation:
    """Permutes [0, rows) by `rank -> (multiplier * rank + offset) mod rows`.

    Plain arithmetic within 63 bits, so that Spark, numpy and Python compute the same.
    """

    rows: int
    multiplier: int
    offset: int

    def __call__(self, rank: int) -> int:
        """Return the row id of a rank."""
        return (self.multiplier * rank + self.offset) % self.rows

    @staticmethod
    def drawn(rows: int, *key: int) -> AffinePermutation:
        """Draw a permutation of [0, rows) by a key."""
        limit = max(1, min(rows, (1 << 62) // max(1, rows)))
        draw = mixed_key(*key)
        while True:
            draw = mixed_key(draw)
            multiplier = 1 + draw % limit
            if math.gcd(multiplier, rows) == 1:
                return AffinePermutation(rows, multiplier, mixed_key(draw) % max(1, rows))


@dataclass(frozen=True)
class Assignment:
    """Deals the row ids of each split out to partitions; ids of validation rows come first.

    ```
    row id      0   1   2 | 3   4   5   6   7      3 validation rows of 8, two partitions
    split          val    |       train
    partition   0   1   0 | 0   1   0   1   0
    ```

    Raises:
        DataError: a split has fewer rows than there are partitions.
    """

    rows: int
    validation_rows: int
    num_partitions: int
    has_validation: bool

    def __post_init__(self) -> None:
        """Refuse numbers that would leave a partition without rows."""
        validation_rows = self.validation_rows if self.has_validation else None
        check_rows(self.rows - self.validation_rows, validation_rows, self.num_partitions)

    def ids(self, split: str, index: int) -> range:
        """Return the row ids of one partition, ascending as they are stored."""
        held_back = self.validation_rows
        start, stop = (0, held_back) if split == "val" else (held_back, self.rows)
        return range(start + index, stop, self.num_partitions)

    def partitions(self, below: str) -> tuple[PartitionInfo, ...]:
        """Describe every partition of a folder; checksums are known before a row is written."""
        splits = ("train", "val") if self.has_validation else ("train",)
        return tuple(
            PartitionInfo(split, index, len(ids), checksum(ids), path)
            for split in splits
            for index in range(self.num_partitions)
            for ids in (self.ids(split, index),)
            for path in (f"{below}/{partition_path(split, index)}",)
        )


def check_rows(train_rows: int, validation_rows: int | None, num_partitions: int) -> None:
    """Refuse numbers that would leave a partition without rows.

    Args:
        train_rows: rows to train on.
        validation_rows: rows to validate on; None where nothing is validated.
        num_partitions: partitions of each split.

    Raises:
        DataError: a split has fewer rows than there are partitions.
    """
    for rows, which, other in (
        (train_rows, "training", "smaller"),
        (validation_rows, "validation", "larger"),
    ):
        if rows is not None and rows < num_partitions:
            raise DataError(
                f"{rows} {which} rows are fewer than {num_partitions} partitions: use fewer "
                f"workers, more rows or a {other} validation part"
            )


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map 64-bit numbers one to one to well mixed ones, by the finaliser of splitmix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
    with the constants of Vigna's splitmix64.c.
    """
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def mixed_key(*parts: int) -> int:
    """Fold integers, whose order counts, into one 64-bit number."""
    key = 0
    for part in parts:
        # Array arithmetic wraps as it must; numpy's scalars would warn.
        key = int(mix64(np.array([key ^ (part & _MASK)], dtype=np.uint64))[0])
    return key


def checksum(ids: NDArray[np.int64] | range) -> int:
    """Sum the mixed row ids modulo 2^64; any order gives the same number.

    A row that is lost, repeated, or exchanged for another changes it; a count alone may not.
    """
    total = 0
    for start in range(0, len(ids), _CHUNK):
        chunk = np.asarray(ids[start : start + _CHUNK], dtype=np.int64)
        total += int(mix64(chunk.view(np.uint64)).sum(dtype=np.uint64))
    return total & _MASK


def permutation(rows: int, key: int) -> NDArray[np.int64]:
    """Return an order of row positions that `key` alone decides, on every machine and numpy."""
    with np.errstate(over="ignore"):
        values = np.uint64(key & _MASK) + np.arange(rows, dtype=np.uint64)
    # The mixed values differ from each other, so that sorting them leaves no ties.
    return np.argsort(mix64(values), kind="stable").astype(np.int64, copy=False)


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


class ContentDigest:
    """Sums a hash of (row id, value) over the rows of each column, modulo 2^64.

    Values are hashed by their bits, so that 0.0 and -0.0 differ. A change within one 32-bit word
    always changes the digest of its column. Any other change, such as an exchange of values, goes
    unseen with a chance of about 2^-64, or of 2^-32 if only the highest bits of words differ. The
    digest guards against damage, not against somebody who computes it anew.
    """

    def __init__(self, columns: int) -> None:
        """Begin with no row."""
        self._sums = [0] * columns

    def add(self, ids: NDArray[np.int64], columns: Sequence[NDArray[Any]]) -> None:
        """Add rows: their ids, and for each column an array of shape (rows, *shape of a row)."""
        for start in range(0, len(ids), _BLOCK):
            rows = slice(start, start + _BLOCK)
            keys = mix64(ids[rows].view(np.uint64))
            for i, values in enumerate(columns):
                hashes = mix64(keys ^ row_hashes(values[rows]))
                self._sums[i] = (self._sums[i] + int(hashes.sum(dtype=np.uint64))) & _MASK

    @property
    def digests(self) -> tuple[int, ...]:
        """Return the digest of each column."""
        return tuple(self._sums)


def row_hashes(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash each row of an array of shape (rows, ...) by its bits; shape (rows,).

    A row that is a bytes object has its xxh3. Any other is the sum of its 32-bit words, each times
    an odd 64-bit factor of its place, modulo 2^64: one changed word always shows.

    Source: Lemire, Kaser, "Strongly universal string hashing is fast", The Computer Journal 2014
    (multilinear hashing).
    """
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    if flat.dtype == object:
        return np.array([short_digest(cell) for cell in flat[:, 0]], np.uint64)
    words = flat.view(np.uint8 if flat.dtype == np.bool_ else np.uint32)
    width = words.shape[1]
    factors = mix64(np.arange(width, dtype=np.uint64)) | np.uint64(1)
    hashes = np.empty(len(words), np.uint64)
    rows = max(1, _BLOCK // max(1, width))
    for start in range(0, len(words), rows):
        block = words[start : start + rows].astype(np.uint64)
        hashes[start : start + rows] = np.einsum("ij,j->i", block, factors)
    return hashes
