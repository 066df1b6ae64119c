"""Learns what a preparation must know of each row in one pass, and keeps 128 bits of hash of each.

```
rows -> facts of each row: two hashes, its place, a suspicion, lengths    on Spark's disks
     -> one aggregate: rows per bucket of the hash, sums, suspicions, shapes
     -> the ranks at which chunks end                                    of their buckets alone
     -> rows and sums of hashes of each chunk
```
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from cerebro_hydra.data.cells import CELLS
from cerebro_hydra.data.preparation.frame_columns import ColumnPlan, PackPlan
from cerebro_hydra.data.rows import mixed_key

FLAG, HASHES, PLACE, KEY = "is_validation", ("hash_0", "hash_1"), "place", "bucket"
_SUSPECT, _RANK = "suspect", "rank"
_BITS = 8
_BUCKETS = 1 << _BITS
_HALF = 0xFFFFFFFF
_SIGN = 1 << 63
_MASK = (1 << 64) - 1

_LOW_32 = (1 << 32) - 1


def packed_rows(rows: DataFrame, packs: Sequence[PackPlan], seed: int) -> DataFrame:
    """Return the packs of the rows with two hashes, the place among rows, and the bucket.

    The hashes are seeded, so that the seed decides their order, and which rows are held back.
    """
    packed = rows.select("*", *(pack.packed().alias(pack.name) for pack in packs))
    parts = [*(F.col(pack.name) for pack in packs), F.col(FLAG)]
    seeds = (mixed_key(seed, i) for i in range(len(HASHES)))
    hashed = {
        name: F.xxhash64(F.lit((key ^ _SIGN) - _SIGN), *parts)
        for name, key in zip(HASHES, seeds, strict=True)
    }
    # Equal rows have equal hashes; where a chunk ends among them, their places part them.
    packed = packed.withColumns({**hashed, PLACE: F.monotonically_increasing_id()})
    bucket = F.shiftright(F.col(HASHES[0]), 64 - _BITS) + (_BUCKETS // 2)
    above = F.when(F.col(FLAG), _BUCKETS).when(~F.col(FLAG), 0)
    return packed.withColumn(KEY, (bucket + above).cast("int"))


@dataclass(frozen=True)
class Content:
    """Holds the findings of the pass over the rows."""

    rows: int
    sums: Mapping[str, int]
    counts: Mapping[bool | None, Sequence[int]]
    """The rows in each bucket, by the mark for validation; None where it is neither."""
    suspects: int
    """The rows that may have a fault."""
    lengths: Mapping[str, Sequence[tuple[int, int]]]
    cell_bytes: Mapping[str, int]
    """The bytes of all rows of each column of cells."""


class RowFacts:
    """Keeps the facts of rows on Spark's disks until it is left."""

    def __init__(
        self, packed: DataFrame, packs: Sequence[PackPlan], plans: Sequence[ColumnPlan]
    ) -> None:
        """Compute nothing yet."""
        self._nested = [plan for plan in plans if plan.depth]
        self._cells = [plan for plan in plans if plan.dtype in CELLS]
        suspect = F.lit(False)
        for pack in packs:
            suspect = suspect | pack.suspect()
        lengths = [
            column.alias(f"{plan.stored}_{end}_{i}")
            for plan in self._nested
            for i, ends in enumerate(plan.lengths())
            for end, column in zip(("low", "high"), ends, strict=True)
        ]
        lengths += [
            F.octet_length(plan.flat()).alias(f"{plan.stored}_bytes") for plan in self._cells
        ]
        self._facts = packed.select(*HASHES, PLACE, KEY, suspect.alias(_SUSPECT), *lengths)

    def __enter__(self) -> RowFacts:
        # Not in memory: that of a Java may be smaller than what a billion rows need.
        self._facts.persist(StorageLevel.DISK_ONLY)
        return self

    def __exit__(self, *_: object) -> None:
        self._facts.unpersist()

    def content(self) -> Content:
        """Read all rows."""
        aggregates = {"rows": F.count(F.lit(1)), **_sums()}
        summed = [*aggregates, _SUSPECT]
        aggregates[_SUSPECT] = F.sum(F.col(_SUSPECT).cast("bigint"))
        for plan in self._nested:
            for i in range(plan.depth):
                aggregates[f"{plan.stored}_low_{i}"] = F.min(f"{plan.stored}_low_{i}")
                aggregates[f"{plan.stored}_high_{i}"] = F.max(f"{plan.stored}_high_{i}")
        for plan in self._cells:
            aggregates[f"{plan.stored}_bytes"] = F.sum(f"{plan.stored}_bytes")
        columns = [column.alias(name) for name, column in aggregates.items()]
        groups = self._facts.groupBy(KEY).agg(*columns).collect()
        counts = {flag: [0] * _BUCKETS for flag in (False, True, None)}
        for group in groups:
            key = group[KEY]
            flag, bucket = (None, 0) if key is None else (key >= _BUCKETS, key % _BUCKETS)
            counts[flag][bucket] = group["rows"]
        sums = {name: sum(group[name] for group in groups) for name in summed}
        suspects = sums.pop(_SUSPECT)
        lengths = {
            plan.name: [
                (
                    min(_known(groups, f"{plan.stored}_low_{i}"), default=0),
                    max(_known(groups, f"{plan.stored}_high_{i}"), default=0),
                )
                for i in range(plan.depth)
            ]
            for plan in self._nested
        }
        cell_bytes = {
            plan.name: sum(_known(groups, f"{plan.stored}_bytes")) for plan in self._cells
        }
        return Content(sums["rows"], sums, counts, suspects, lengths, cell_bytes)

    def range_of(self, content: Content, sizes: Mapping[bool, Sequence[int]]) -> Column:
        """Return what computes the chunk of a row from its hashes, place and bucket.

        Args:
            content: of these rows.
            sizes: the rows of each chunk of the rows with this mark; all rows with the first mark
                come first in the numbering of chunks.
        """
        first = 0
        cuts = {flag: [BucketCut(0, ())] * _BUCKETS for flag in (False, True)}
        for flag, of_flag in sizes.items():
            cuts[flag] = cut_buckets(content.counts[flag], of_flag, first)
            first += len(of_flag)
        ordered = [*cuts[False], *cuts[True]]
        key = F.col(KEY)
        chunk = _longs(cut.chunk for cut in ordered)[key].cast("int")
        ranks = [(place, rank) for place, cut in enumerate(ordered) for rank in cut.ranks]
        if not ranks:
            return chunk
        inside = _longs(len(cut.ranks) for cut in ordered)[key].cast("int")
        # Slices count from 1.
        before = accumulate((len(cut.ranks) for cut in ordered[:-1]), initial=1)
        begins = _longs(before)[key].cast("int")
        limits = self._limits(ranks, F.slice(_longs(rank for _, rank in ranks), begins, inside))
        here = F.struct(*HASHES, PLACE)
        passed = F.filter(F.slice(limits, begins, inside), lambda limit: limit <= here)
        return F.when(inside == 0, chunk).otherwise(chunk + F.size(passed))

    def _limits(self, ranks: Sequence[tuple[int, int]], sought: Column) -> Column:
        """Return as an array the hashes and places of the rows that begin a chunk in a bucket."""
        buckets = sorted({bucket for bucket, _ in ranks})
        order = (*HASHES, PLACE)
        ranked = (
            self._facts.where(F.col(KEY).isin(buckets))
            .select(KEY, *order)
            .withColumn(_RANK, F.row_number().over(Window.partitionBy(KEY).orderBy(*order)))
            .where(F.array_contains(sought, F.col(_RANK).cast("bigint") - 1))
        )
        found = {(row[KEY], row[_RANK] - 1): row for row in ranked.collect()}
        texts = []
        for rank in ranks:
            values = ", ".join(f"'{name}', {found[rank][name]}L" for name in order)
            texts.append(f"named_struct({values})")
        return F.expr(f"array({', '.join(texts)})")

    def sums_of(self, chunk: Column) -> dict[int, tuple[int, tuple[int, ...]]]:
        """Return for each chunk its rows, and the sums of their hashes modulo 2^64."""
        aggregates = {"rows": F.count(F.lit(1)), **_sums()}
        columns = [column.alias(name) for name, column in aggregates.items()]
        groups = self._facts.groupBy(chunk.alias("chunk")).agg(*columns).collect()
        return {
            group["chunk"]: (
                group["rows"],
                tuple(
                    (group[f"low_{i}"] + (group[f"high_{i}"] << 32)) & _MASK
                    for i in range(len(HASHES))
                ),
            )
            for group in groups
        }


def _sums() -> dict[str, Column]:
    """Return sums of halves: a sum of whole hashes overflows, which is an error in ANSI mode."""
    found = {}
    for i, name in enumerate(HASHES):
        found[f"low_{i}"] = F.sum(F.col(name).bitwiseAND(F.lit(_HALF)))
        found[f"high_{i}"] = F.sum(F.shiftrightunsigned(F.col(name), 32))
    return found


def _known(groups: Sequence[Row], name: str) -> list[int]:
    return [group[name] for group in groups if group[name] is not None]


def _longs(values: Iterable[int]) -> Column:
    """Return a literal array."""
    return F.expr(f"array({', '.join(f'{value}L' for value in values)})")


@dataclass(frozen=True)
class BucketCut:
    """Says which chunks the rows of a bucket go to, in the order of their hash."""

    chunk: int
    """The chunk of its first row."""
    ranks: tuple[int, ...]
    """The ranks in the bucket, ascending, at which the next chunks begin."""


def cut_buckets(counts: Sequence[int], sizes: Sequence[int], first: int = 0) -> list[BucketCut]:
    """Cut rows in hash order into chunks of these sizes.

    Args:
        counts: the rows in each bucket; buckets are in hash order.
        sizes: the rows of each chunk, each above 0; they sum to all rows.
        first: the number of the first chunk.

    Raises:
        ValueError: the sizes are not those of so many rows.
    """
    if sum(counts) != sum(sizes) or any(size < 1 for size in sizes):
        raise ValueError(f"{sum(counts)} rows can't fill chunks of {list(sizes)} rows")
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

    A chunk's number itself would share a partition with others, and leave some without any.
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
    mixed = (value & _LOW_32) * 0xCC9E2D51 & _LOW_32
    mixed = _rotated(mixed, 15) * 0x1B873593 & _LOW_32
    state = (_rotated(42 ^ mixed, 13) * 5 + 0xE6546B64) & _LOW_32
    state ^= 4  # the bytes of an integer
    state = (state ^ state >> 16) * 0x85EBCA6B & _LOW_32
    state = (state ^ state >> 13) * 0xC2B2AE35 & _LOW_32
    state ^= state >> 16
    return state - (1 << 32) if state >> 31 else state


def _rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _LOW_32
