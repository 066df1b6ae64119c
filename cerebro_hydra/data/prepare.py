"""Prepares a DataFrame: Spark checks the rows, then writes them to balanced partitions.

```
DataFrame -> converted, persisted -> one aggregate: faults, shapes, content, rows per bucket
          -> rank of each row by content -> row id by a seeded permutation -> split, partition
          -> one write, a folder per split and partition, rows sorted by id
          -> each partition read back as agents will read it: the content digests of its columns
```

Rows are numbered by a hash of their content, so that the result does not depend on how Spark
had them partitioned, nor on the size of the cluster.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from pyspark.ml.functions import vector_to_array
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cerebro_hydra.data import faults
from cerebro_hydra.data.arguments import column_problem, require_dataframe
from cerebro_hydra.data.assignment import AffinePermutation, Assignment
from cerebro_hydra.data.data_spec import DataSpec
from cerebro_hydra.data.manifest import (
    ROW_ID,
    ColumnSpec,
    Manifest,
    PartitionInfo,
    stored_name,
)
from cerebro_hydra.data.partition_rows import digest_rows, local_partition
from cerebro_hydra.data.prepared import fingerprint_of, prepare_once
from cerebro_hydra.errors import CerebroHydraError, ConfigurationError, DataError
from cerebro_hydra.storage import Store
from cerebro_hydra.waits import to_nobody

_BUCKETS = 256  # a constant, because ranks depend on it
_FLAG, _HASH, _HASH_2, _BUCKET = "is_validation", "hash", "hash_2", "bucket"
_HALF = 0xFFFFFFFF
_ROWS_PER_TASK = 50_000
_ROW_GROUP_BYTES = 32 << 20  # row groups are read whole, so their size bounds a reader's memory
_SPARK_TYPES = {"int64": "bigint", "float32": "float", "bool": "boolean"}


def prepare(
    df: DataFrame,
    store: Store,
    num_partitions: int,
    spec: DataSpec,
    tell: Callable[[str], None] = to_nobody,
) -> Manifest:
    """Write the columns of a DataFrame to the store, or find them there from an earlier time.

    A column that marks validation rows is boolean, or holds 0 and 1. Integers are kept as int64,
    floats and decimals as float32, booleans as bool; arrays, nested arrays and Spark ML vectors
    must have one shape in all rows. `tell` is given what is done.

    Raises:
        ConfigurationError: an argument is wrong.
        DataError: a column can't be used as it is, or there are too few rows.
        StoreError: the store can't be written, or holds files that contradict their manifest.
    """
    require_dataframe("prepare_data", df)
    _check_arguments(df, num_partitions, spec)
    plans = [_Plan.of(df, name, stored_name(i)) for i, name in enumerate(spec.columns)]
    marker = spec.validation_column
    flag = F.lit(False) if marker is None else _flag(df, marker)
    rows = df.select(*(plan.converted.alias(plan.stored) for plan in plans), flag.alias(_FLAG))
    tell("checking rows")
    rows.persist()  # so that what is checked is what is written, even if the query is random
    try:
        content = _Content.of(rows, plans)
        _refuse_faults(df, plans, content, marker)
        columns = tuple(
            ColumnSpec(plan.name, plan.dtype, _shape(df, plan, content)) for plan in plans
        )
        marked = None if marker is None else sum(content.buckets[True])
        held_back = round(content.rows * spec.validation_share) if marked is None else marked
        has_validation = spec.validation is not None
        assignment = Assignment(content.rows, held_back, num_partitions, has_validation)
        fingerprint = fingerprint_of(
            columns, content.sums, num_partitions, spec.validation, spec.seed
        )

        def write(attempt: str) -> Manifest:
            numbered = _with_row_ids(rows, plans, content, marked, spec.seed)
            url = store.url(f"{store.data_path(fingerprint)}/{attempt}")
            tell(f"preparing {content.rows:,} rows in {num_partitions} partitions")
            _write(numbered, plans, assignment, url)
            manifest = Manifest(fingerprint, columns, assignment.partitions(attempt))
            tell(f"reading {content.rows:,} prepared rows back")
            return _read_back(df.sparkSession, store, manifest)

        return prepare_once(store, fingerprint, write)
    finally:
        rows.unpersist()


def _check_arguments(df: DataFrame, num_partitions: int, spec: DataSpec) -> None:
    is_count = isinstance(num_partitions, int) and not isinstance(num_partitions, bool)
    if not is_count or num_partitions < 1:
        raise ConfigurationError(f"num_partitions is {num_partitions!r}: give an integer above 0")
    needed = dict.fromkeys(spec.columns, "column")
    if spec.validation_column is not None:
        needed.setdefault(spec.validation_column, "validation column")
    for name, what in needed.items():
        if problem := column_problem(df, name, what):
            raise ConfigurationError(problem)


def number_type(kind: T.DataType) -> tuple[str | None, int]:
    """Return the dtype of a Spark type's numbers, and how deep its arrays are nested.

    The dtype is None for what is no number.
    """
    if kind.simpleString() == "vector":
        return "float32", 1
    depth = 0
    while isinstance(kind, T.ArrayType):
        kind, depth = kind.elementType, depth + 1
    families = {"bool": T.BooleanType, "int64": T.IntegralType, "float32": T.NumericType}
    dtypes = (dtype for dtype, family in families.items() if isinstance(kind, family))
    return next(dtypes, None), depth


def as_numbers(df: DataFrame, name: str, dtype: str) -> Column:
    """Convert a column of numbers, nested arrays of them or vectors to a dtype."""
    column, kind = _column(name), df.schema[name].dataType
    if kind.simpleString() == "vector":
        # vector_to_array ends the job at a null, which is to be named with its row instead.
        return F.when(column.isNotNull(), vector_to_array(column, dtype))
    _, depth = number_type(kind)
    return column.cast("array<" * depth + _SPARK_TYPES[dtype] + ">" * depth)


def _column(name: str) -> Column:
    escaped = name.replace("`", "``")
    return F.col(f"`{escaped}`")


def _flag(df: DataFrame, name: str) -> Column:
    kind = df.schema[name].dataType
    if not isinstance(kind, T.BooleanType | T.NumericType):
        raise DataError(
            f"validation column {name!r} is {kind.simpleString()}: it must be boolean, or hold 0 "
            "and 1"
        )
    column = _column(name)
    if isinstance(kind, T.NumericType):
        # Anything else becomes null, which is refused with its row.
        column = F.when(column == 1, F.lit(True)).when(column == 0, F.lit(False))
    return column


@dataclass(frozen=True)
class _Plan:
    """Converts one column; `depth` is its number of array dimensions."""

    name: str
    stored: str
    dtype: str
    depth: int
    converted: Column

    @staticmethod
    def of(df: DataFrame, name: str, stored: str) -> _Plan:
        kind = df.schema[name].dataType
        dtype, depth = number_type(kind)
        if dtype is None:
            shown = kind.simpleString()
            raise faults.unusable(name, shown, text=shown.replace("array<", "")[:6] == "string")
        return _Plan(name, stored, dtype, depth, as_numbers(df, name, dtype))

    def levels(self) -> list[Column]:
        """Return the array with its outermost 0, 1, ... dimensions joined; the last one is flat."""
        levels = [F.col(self.stored)]
        for _ in range(self.depth - 1):
            levels.append(F.flatten(levels[-1]))
        return levels

    def flat(self) -> Column:
        return self.levels()[-1]

    def faults(self) -> dict[str, Column]:
        """Return for each fault the condition that a row has it."""
        levels = self.levels()
        null = levels[0].isNull()
        if self.depth:
            for level in levels:
                null = null | F.coalesce(F.exists(level, lambda x: x.isNull()), F.lit(False))
        found = {faults.NULL: null}
        if self.dtype == "float32":
            # Spark orders NaN above infinity, so that the extremes show every fault.
            low, high = levels[-1], levels[-1]
            if self.depth:
                low, high = F.array_min(low), F.array_max(high)
            infinity = F.lit(float("inf")).cast("float")
            infinite = F.isnan(high) | (high == infinity) | (low == -infinity)
            found[faults.UNFIT["float32"]] = F.coalesce(infinite, F.lit(False))
        return found

    def lengths(self) -> list[tuple[Column, Column]]:
        """Return the shortest and the longest length in a row, for each dimension."""
        if not self.depth:
            return []
        outer = F.size(self.levels()[0])
        inner = [F.transform(level, lambda x: F.size(x)) for level in self.levels()[:-1]]
        return [(outer, outer), *((F.array_min(sizes), F.array_max(sizes)) for sizes in inner)]


@dataclass(frozen=True)
class _Content:
    """Holds the findings of one pass over the converted rows."""

    rows: int
    sums: Mapping[str, int]
    buckets: Mapping[bool | None, Sequence[int]]
    """The rows in each bucket, by the mark for validation; None where it is neither."""
    faults: Mapping[tuple[str, str], int]
    lengths: Mapping[str, Sequence[tuple[int, int]]]

    @staticmethod
    def of(rows: DataFrame, plans: Sequence[_Plan]) -> _Content:
        aggregates = {"rows": F.count(F.lit(1))}
        for half, hashed in enumerate((F.col(_HASH), F.col(_HASH_2))):
            # Halves, because a sum of whole hashes overflows, which is an error in ANSI mode.
            aggregates[f"low_{half}"] = F.sum(hashed.bitwiseAND(F.lit(_HALF)))
            aggregates[f"high_{half}"] = F.sum(F.shiftrightunsigned(hashed, 32))
        summed = list(aggregates)
        for plan in plans:
            for i, fault in enumerate(plan.faults().values()):
                aggregates[f"{plan.stored}_fault_{i}"] = F.sum(fault.cast("bigint"))
            for i, (low, high) in enumerate(plan.lengths()):
                aggregates[f"{plan.stored}_low_{i}"] = F.min(low)
                aggregates[f"{plan.stored}_high_{i}"] = F.max(high)
        columns = [column.alias(name) for name, column in aggregates.items()]
        groups = _hashed(rows, plans).groupBy(_FLAG, _BUCKET).agg(*columns).collect()
        buckets = {flag: [0] * _BUCKETS for flag in (False, True, None)}
        for group in groups:
            buckets[group[_FLAG]][group[_BUCKET]] = group["rows"]
        sums = {name: sum(group[name] for group in groups) for name in summed}
        faults = {
            (plan.name, fault): sum(group[f"{plan.stored}_fault_{i}"] for group in groups)
            for plan in plans
            for i, fault in enumerate(plan.faults())
        }
        lengths = {
            plan.name: [
                (
                    min(_known(groups, f"{plan.stored}_low_{i}"), default=0),
                    max(_known(groups, f"{plan.stored}_high_{i}"), default=0),
                )
                for i in range(plan.depth)
            ]
            for plan in plans
        }
        return _Content(sums["rows"], sums, buckets, faults, lengths)


def _known(groups: Sequence[Row], name: str) -> list[int]:
    return [group[name] for group in groups if group[name] is not None]


def _hashed(rows: DataFrame, plans: Sequence[_Plan]) -> DataFrame:
    """Add 128 bits of hash over each row, and the bucket that the row is ranked in."""
    parts = [*(plan.flat() for plan in plans), F.col(_FLAG)]
    hashed = rows.withColumns(
        {_HASH: F.xxhash64(*parts), _HASH_2: F.xxhash64(F.lit(_BUCKETS), *parts)}
    )
    return hashed.withColumn(_BUCKET, F.col(_HASH).bitwiseAND(F.lit(_BUCKETS - 1)).cast("int"))


def _refuse_faults(
    df: DataFrame, plans: Sequence[_Plan], content: _Content, marker: str | None
) -> None:
    if not content.rows:
        raise DataError("the DataFrame is empty: there are no rows to prepare")
    for plan in plans:
        for fault, condition in plan.faults().items():
            count = content.faults[plan.name, fault]
            if count:
                example = _example(df, plan, condition)
                raise faults.faulty(plan.name, fault, example, (count, content.rows))
    unmarked = sum(content.buckets[None])
    if marker is not None and unmarked:
        row = df.where(_flag(df, marker).isNull()).first()
        raise DataError(
            f"validation column {marker!r} is neither true nor false in {unmarked} "
            f"of {content.rows} rows, as in {_shown(row)}: fill it with true or false"
        )


def _shape(df: DataFrame, plan: _Plan, content: _Content) -> tuple[int, ...]:
    """Return the shape that all rows of a column have."""
    for dimension, (shortest, longest) in enumerate(content.lengths[plan.name]):
        if shortest != longest:
            short = plan.lengths()[dimension][0] == shortest
            example = _example(df, plan, short)
            raise faults.ragged(plan.name, shortest, longest, dimension, example)
        if longest == 0:
            raise faults.without_elements(plan.name)
    return tuple(longest for _, longest in content.lengths[plan.name])


def _example(df: DataFrame, plan: _Plan, condition: Column) -> str:
    row = df.withColumn(plan.stored, plan.converted).where(condition).drop(plan.stored).first()
    return _shown(row)


def _shown(row: Row | None) -> str:
    if row is None:
        return "a row that a second look did not find"
    values = (f"{name}={reprlib.repr(value)}" for name, value in row.asDict().items())
    return f"Row({', '.join(values)})"


def _with_row_ids(
    rows: DataFrame, plans: Sequence[_Plan], content: _Content, held_back: int | None, seed: int
) -> DataFrame:
    """Add the row id: a seeded permutation of the row's rank by content.

    `held_back` is None where the rows to hold back are not marked; all rows are ranked together
    then. Else validation and training rows are ranked apart, and validation rows' ids come first.
    """
    in_bucket = Window.partitionBy(_BUCKET, _FLAG).orderBy(_HASH, _HASH_2)
    rank = F.row_number().over(in_bucket).cast("bigint") - 1
    row_id = _row_id(rank, content.buckets[False], held_back or 0, seed)
    if held_back is not None:
        marked = _row_id(rank, content.buckets[True], 0, seed)
        row_id = F.when(F.col(_FLAG), marked).otherwise(row_id)
    # The number of tasks is free: ranks are counted in buckets.
    tasks = min(_BUCKETS, max(1, content.rows // _ROWS_PER_TASK))
    return _hashed(rows, plans).repartition(tasks, _BUCKET, _FLAG).withColumn(ROW_ID, row_id)


def _row_id(rank: Column, counts: Sequence[int], first: int, seed: int) -> Column:
    """Compute the row id from the rank in a bucket; `counts` are the rows in the buckets."""
    below = ",".join(f"{before}L" for before in accumulate(counts, initial=0))
    permutation = AffinePermutation.drawn(sum(counts), seed)
    in_all = rank + F.expr(f"array({below})")[F.col(_BUCKET)]
    scattered = (in_all * permutation.multiplier + permutation.offset) % permutation.rows
    return scattered + first


def _write(numbered: DataFrame, plans: Sequence[_Plan], assignment: Assignment, url: str) -> None:
    held_back, count = assignment.validation_rows, assignment.num_partitions
    row_id = F.col(ROW_ID)
    split = F.when(row_id < held_back, "val").otherwise("train")
    dealt = F.when(row_id < held_back, row_id).otherwise(row_id - held_back) % count
    out = numbered.select(
        *(plan.flat().alias(plan.stored) for plan in plans),
        ROW_ID,
        split.alias("split"),
        F.format_string("%05d", dealt).alias("partition"),
    )
    folders = count * (2 if assignment.has_validation else 1)
    (
        out.repartition(folders, "split", "partition")
        .sortWithinPartitions("split", "partition", ROW_ID)
        .write.partitionBy("split", "partition")
        .option("compression", "snappy")
        .option("parquet.block.size", _ROW_GROUP_BYTES)
        .option("maxRecordsPerFile", 0)
        .parquet(url)
    )


def _digests(
    manifest: Manifest, store: Store, info: PartitionInfo
) -> tuple[int, ...] | CerebroHydraError:
    """Digest a partition; an error is returned, because Spark would try again and wrap it."""
    try:
        with local_partition(info, manifest, store, None) as data_path:
            return digest_rows(info, manifest, data_path)
    except CerebroHydraError as error:
        return error


def _read_back(session: SparkSession, store: Store, manifest: Manifest) -> Manifest:
    """Return the manifest with the content digests that Spark's tasks make of what was written."""
    infos = manifest.partitions
    tasks = session.sparkContext.parallelize(infos, len(infos))
    outcomes = tasks.map(partial(_digests, manifest, store)).collect()
    partitions = []
    for info, outcome in zip(infos, outcomes, strict=True):
        if isinstance(outcome, CerebroHydraError):
            raise outcome
        partitions.append(replace(info, digests=outcome))
    return replace(manifest, partitions=tuple(partitions))
