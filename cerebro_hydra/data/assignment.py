"""Assigns rows to partitions by row id, balanced to within one row."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cerebro_hydra.data.manifest import PartitionInfo, partition_path
from cerebro_hydra.data.row_ids import checksum, mixed_key
from cerebro_hydra.errors import DataError


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
