"""Learns what a preparation must know of each row in one pass, and keeps 128 bits of hash of each.

```
rows -> facts of each row: two hashes, its place, a suspicion, lengths    on Spark's disks
     -> one aggregate: rows and sums per bucket of the hash, suspicions, shapes
     -> the rows at which chunks end, with the sums before them         of their buckets alone
```
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from cerebro_hydra.data.cells import CELLS
from cerebro_hydra.data.preparation.frame_columns import ColumnPlan, PackPlan
from cerebro_hydra.data.rows import mixed_key

FLAG, HASHES, PLACE, KEY = "is_validation", ("hash_0", "hash_1"), "place", "bucket"
_ORDER = (*HASHES, PLACE)
_SUSPECT, _RANK = "suspect", "rank"
_BITS = 8
_BUCKETS = 1 << _BITS
_HALF = 0xFFFFFFFF
_SIGN = 1 << 63
_MASK = (1 << 64) - 1
_FEW = 20_000  # rows that are sorted here sooner than Spark begins

_LOW_32 = (1 << 32) - 1
_NOTHING = (0,) * len(HASHES)  # the sums of no rows


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
    bucket_sums: Mapping[bool | None, Sequence[tuple[int, ...]]]
    """The sums of their hashes."""
    suspects: int
    """The rows that may have a fault."""
    lengths: Mapping[str, Sequence[tuple[int, int]]]
    cell_bytes: Mapping[str, int]
    """The bytes of all rows of each column of cells."""


@dataclass(frozen=True)
class ChunkRanges:
    """Says which rows a chunk has.

    Args:
        number: computes the chunk of a row from its hashes, place and bucket.
        expected: for each chunk its rows, and the sums of their hashes modulo 2^64.
    """

    number: Column
    expected: Mapping[int, tuple[int, tuple[int, ...]]]


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
        bucket_sums = {flag: [_NOTHING] * _BUCKETS for flag in (False, True, None)}
        for group in groups:
            key = group[KEY]
            flag, bucket = (None, 0) if key is None else (key >= _BUCKETS, key % _BUCKETS)
            counts[flag][bucket] = group["rows"]
            bucket_sums[flag][bucket] = _whole_sums(group)
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
        return Content(sums["rows"], sums, counts, bucket_sums, suspects, lengths, cell_bytes)

    def ranges(self, content: Content, sizes: Mapping[bool, Sequence[int]]) -> ChunkRanges:
        """Return which rows each chunk has.

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
        counts = [*content.counts[False], *content.counts[True]]
        totals = [*content.bucket_sums[False], *content.bucket_sums[True]]
        if not ranks:
            return ChunkRanges(chunk, chunk_sums(counts, totals, ordered, {}))
        inside = _longs(len(cut.ranks) for cut in ordered)[key].cast("int")
        # Slices count from 1.
        before = accumulate((len(cut.ranks) for cut in ordered[:-1]), initial=1)
        begins = _longs(before)[key].cast("int")
        buckets = sorted({bucket for bucket, _ in ranks})
        rows = self._facts.where(F.col(KEY).isin(buckets))
        if sum(counts[bucket] for bucket in buckets) <= _FEW:
            borders = _few_borders(rows.select(KEY, *_ORDER).collect(), ranks)
        else:
            borders = _borders(rows, F.slice(_longs(rank for _, rank in ranks), begins, inside))
        here = F.struct(*_ORDER)
        limits = _rows_as_array(borders[rank].begins for rank in ranks)
        passed = F.filter(F.slice(limits, begins, inside), lambda limit: limit <= here)
        number = F.when(inside == 0, chunk).otherwise(chunk + F.size(passed))
        sums = {rank: border.before for rank, border in borders.items()}
        return ChunkRanges(number, chunk_sums(counts, totals, ordered, sums))


@dataclass(frozen=True)
class _Border:
    """Is where a chunk begins in a bucket."""

    begins: Row
    """Its first row."""
    before: tuple[int, ...]
    """The sums of the hashes of the bucket's rows before it."""


def _borders(rows: DataFrame, sought: Column) -> dict[tuple[int, int], _Border]:
    """Find the borders in some buckets' rows, by bucket and rank there.

    Args:
        sought: the ranks that are sought in a row's bucket.
    """
    window = Window.partitionBy(KEY).orderBy(*_ORDER)
    earlier = window.rowsBetween(Window.unboundedPreceding, -1)
    sums = (column.over(earlier).alias(name) for name, column in _sums().items())
    ranked = rows.select(KEY, *_ORDER, F.row_number().over(window).alias(_RANK), *sums).where(
        F.array_contains(sought, F.col(_RANK).cast("bigint") - 1)
    )
    found = ranked.collect()
    return {(row[KEY], row[_RANK] - 1): _Border(row, _whole_sums(row)) for row in found}


def _few_borders(
    rows: Sequence[Row], ranks: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], _Border]:
    """Do what `_borders` does here, where rows are so few that Spark takes longer to plan it."""
    of_bucket = defaultdict[int, list[Row]](list)
    for row in sorted(rows, key=itemgetter(*_ORDER)):
        of_bucket[row[KEY]].append(row)
    found = {}
    for bucket, rank in ranks:
        ordered = of_bucket[bucket]
        sums = tuple(sum(row[name] for row in ordered[:rank]) & _MASK for name in HASHES)
        found[bucket, rank] = _Border(ordered[rank], sums)
    return found


def chunk_sums(
    counts: Sequence[int],
    totals: Sequence[tuple[int, ...]],
    cuts: Sequence[BucketCut],
    before: Mapping[tuple[int, int], tuple[int, ...]],
) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Return for each chunk its rows, and the sums of their hashes modulo 2^64.

    Args:
        counts: the rows in each bucket.
        totals: the sums of their hashes.
        cuts: of the buckets.
        before: the sums of a bucket's rows before a rank at which it is cut, by both.
    """
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    for place, (cut, count, total) in enumerate(zip(cuts, counts, totals, strict=True)):
        if not count:
            continue
        ends = [*((rank, before[place, rank]) for rank in cut.ranks), (count, total)]
        for number, (start, end) in enumerate(pairwise([(0, _NOTHING), *ends]), cut.chunk):
            rows, sums = found.get(number, (0, _NOTHING))
            parts = zip(sums, end[1], start[1], strict=True)
            more = tuple((own + to - since) & _MASK for own, to, since in parts)
            found[number] = rows + end[0] - start[0], more
    return found


def _sums() -> dict[str, Column]:
    """Return sums of halves: a sum of whole hashes overflows, which is an error in ANSI mode."""
    found = {}
    for i, name in enumerate(HASHES):
        found[f"low_{i}"] = F.sum(F.col(name).bitwiseAND(F.lit(_HALF)))
        found[f"high_{i}"] = F.sum(F.shiftrightunsigned(F.col(name), 32))
    return found


def _whole_sums(row: Row) -> tuple[int, ...]:
    """Return the sums of whole hashes modulo 2^64."""
    return tuple((row[f"low_{i}"] + (row[f"high_{i}"] << 32)) & _MASK for i in range(len(HASHES)))


def _known(groups: Sequence[Row], name: str) -> list[int]:
    return [group[name] for group in groups if group[name] is not None]


def _longs(values: Iterable[int]) -> Column:
    """Return an array, which Spark folds to a literal sooner than it parses as many numbers."""
    return F.split(F.lit(",".join(map(str, values))), ",").cast("array<bigint>")


def _rows_as_array(rows: Iterable[Row]) -> Column:
    """Return a literal array of the hashes and places of rows."""
    names = (*HASHES, PLACE)
    texts = (", ".join(f"'{name}', {row[name]}L" for name in names) for row in rows)
    return F.expr(f"array({', '.join(f'named_struct({text})' for text in texts)})")


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
