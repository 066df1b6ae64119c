"""Decides which range of a hash's order is which folder of rows, exact to the row.

```
bucket        0      1      2      3         the highest bits of the hash, rows counted in each
rows          3      4      0      5         12 rows for folders of 5 and 7
order         0 1 2  3 4 5 6       7 .. 11
folder        0 0 0  0 0 1 1       1 .. 1    only bucket 1 is ranked: folder 1 begins at its rank 2
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_MASK = (1 << 32) - 1


@dataclass(frozen=True)
class BucketCut:
    """Says which folders the rows of a bucket go to, in the order of their hash."""

    folder: int
    """The folder of its first row."""
    ranks: tuple[int, ...]
    """The ranks in the bucket, ascending, at which the next folders begin."""


def cut_buckets(counts: Sequence[int], sizes: Sequence[int], first: int = 0) -> list[BucketCut]:
    """Cut rows in hash order into folders of these sizes.

    Args:
        counts: the rows in each bucket; buckets are in hash order.
        sizes: the rows of each folder, each above 0; they sum to all rows.
        first: the number of the first folder.

    Raises:
        ValueError: the sizes are not those of so many rows.
    """
    if sum(counts) != sum(sizes) or any(size < 1 for size in sizes):
        raise ValueError(f"{sum(counts)} rows can't fill folders of {list(sizes)} rows")
    borders = list(accumulate(sizes))[:-1]
    cuts = []
    start = at = 0
    for count in counts:
        while at < len(borders) and borders[at] <= start:
            at += 1
        inside = at
        while inside < len(borders) and borders[inside] < start + count:
            inside += 1
        cuts.append(BucketCut(first + at, tuple(each - start for each in borders[at:inside])))
        start += count
    return cuts


def shuffle_keys(partitions: int) -> list[int]:
    """Return for each of Spark's partitions an integer that its hash partitioning sends there.

    A folder's number itself would share a partition with others, and leave some without any.
    """
    found: dict[int, int] = {}
    key = 0
    while len(found) < partitions:
        found.setdefault(spark_hash(key) % partitions, key)
        key += 1
    return [found[partition] for partition in range(partitions)]


def spark_hash(value: int) -> int:
    """Return the signed hash that Spark partitions a 32-bit integer by.

    Source: Murmur3_x86_32.hashInt of Spark, with seed 42.
    """
    mixed = (value & _MASK) * 0xCC9E2D51 & _MASK
    mixed = _rotated(mixed, 15) * 0x1B873593 & _MASK
    state = (_rotated(42 ^ mixed, 13) * 5 + 0xE6546B64) & _MASK
    state ^= 4  # the bytes of an integer
    state = (state ^ state >> 16) * 0x85EBCA6B & _MASK
    state = (state ^ state >> 13) * 0xC2B2AE35 & _MASK
    state ^= state >> 16
    return state - (1 << 32) if state >> 31 else state


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _MASK
