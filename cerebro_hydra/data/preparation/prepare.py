"""Prepares a DataFrame: Spark checks the rows, then writes them to balanced partitions.

```
DataFrame -> converted -> facts of each row, kept on disk: a seeded hash, a suspicion, lengths
          -> ranges of the hash, one for each split and partition, exact to the row,
             and in chunks that a task can sort in little memory
          -> one shuffle by chunk, sorted by hash -> a writer for each chunk: ids, digests, Parquet
```

Rows are told apart by a hash of their content, so that the result does not depend on how Spark
had them partitioned, nor on the size of the cluster. A source that is cheap to read is read twice;
of any other the converted rows are kept on Spark's disks. What reaches the writer of a chunk is
compared with the facts by the sums of 128 bits of hash.
"""

from __future__ import annotations

import math
import reprlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from cerebro_hydra.data import decoder
from cerebro_hydra.data.cells import CELLS, numpy_dtype
from cerebro_hydra.data.manifest import ColumnSpec, Manifest, RowsFound, stored_name
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.frame_columns import ColumnPlan, PackPlan, validation_flag
from cerebro_hydra.data.preparation.partition_writer import (
    CHUNK,
    OUTCOME,
    Chunk,
    Pack,
    WriteJob,
    chunks_of,
)
from cerebro_hydra.data.preparation.prepared import fingerprint_of, prepare_once
from cerebro_hydra.data.preparation.row_facts import (
    FLAG,
    HASHES,
    ChunkRanges,
    Content,
    RowFacts,
    packed_rows,
    shuffle_keys,
)
from cerebro_hydra.data.preparation.source_files import (
    CheckedSource,
    begins_at_once,
    reads_files_only,
    source_files,
)
from cerebro_hydra.data.preparation.tables import refuse_tables_as_files
from cerebro_hydra.data.rows import Assignment
from cerebro_hydra.data.spec import DataSpec, column_problem, require_dataframe
from cerebro_hydra.errors import ConfigurationError, DataError, StoreError
from cerebro_hydra.storage import Store
from cerebro_hydra.waits import to_nobody
from cerebro_hydra.worker_imports import own_workers

_CHUNK_BYTES = 256 << 20  # a sort of more takes memory that grows with them
_MANY_TASKS = 256  # each costs Spark and its Python workers some 50 ms
_MASK = (1 << 64) - 1
_COLUMNS_LOOKED_AT = 50  # at once, in a query that Spark can still compile

_BATCH_BYTES = 8 << 20
_UNKNOWN_BYTES = 64 << 10  # of an array, where a look at one would run a query
_NUMBER_BYTES = 8
_FIRST_BYTES = 32 << 20  # of first rows that are worth a look: as Python's numbers they are slow
_ROWS = {
    "spark.sql.parquet.columnarReaderBatchSize": 4096,
    "spark.sql.orc.columnarReaderBatchSize": 4096,
    "spark.sql.inMemoryColumnarStorage.batchSize": 10_000,
    "spark.sql.execution.arrow.maxRecordsPerBatch": 10_000,
}
"""Spark's settings of rows at once, with its defaults."""


def prepare(
    df: DataFrame,
    store: Store,
    num_partitions: int,
    spec: DataSpec,
    tell: Callable[[str], None] = to_nobody,
    report: Callable[[str], None] = to_nobody,
    recheck: bool = False,
) -> Manifest:
    """Write the columns of a DataFrame to the store, or find them there from an earlier time.

    A column that marks validation rows is boolean, or holds 0 and 1. Integers are kept as int64,
    floats and decimals as float32, booleans as bool; arrays, nested arrays and Spark ML vectors
    must have one shape in all rows. Bytes and Spark's images are kept as they are, of any length.
    `tell` is given what is done, `report` what was found.

    Where the query reads files alone, and was prepared before, the names, sizes and times of the
    files stand for their rows, unless `recheck` asks to read them.

    Raises:
        ConfigurationError: an argument is wrong.
        DataError: a column can't be used as it is, there are too few rows, or they are of files
            which only the log of their table knows.
        StoreError: the store can't be written, or holds files that contradict their manifest.
    """
    require_dataframe("prepare_data", df)
    _check_arguments(df, num_partitions, spec)
    refuse_tables_as_files(df)
    files = source_files(df)
    source = None if files is None else CheckedSource(store, *files, num_partitions, spec)
    if source is not None and not recheck and (known := source.find()):
        manifest, since = known
        report(
            f"files unchanged since {since}: their rows are prepared, and not read again "
            "(recheck=True reads them)"
        )
        return manifest
    manifest = _prepared(df, store, num_partitions, spec, tell)
    if source is not None:
        source.remember(manifest)
    return manifest


def identify(
    df: DataFrame,
    store: Store,
    num_partitions: int,
    spec: DataSpec,
    tell: Callable[[str], None] = to_nobody,
) -> RowsFound:
    """Find out what `prepare` would make of a DataFrame; nothing is written, shuffled or kept.

    Rows are read once and added up, unless they are of unchanged files that were prepared before.

    Raises:
        ConfigurationError: an argument is wrong.
        DataError: a column can't be used as it is, or rows are of files as `prepare` refuses.
    """
    _check_arguments(df, num_partitions, spec)
    refuse_tables_as_files(df)
    files = source_files(df)
    if files is not None and (known := CheckedSource(store, *files, num_partitions, spec).find()):
        manifest, _ = known
        rows = sum(info.rows for info in manifest.partitions)
        compared = f"the query, and names, sizes and times of its {len(files.files)} files"
        return RowsFound(manifest.fingerprint, rows, compared)
    tell("comparing rows")
    plans, packs, converted = _converted(df, spec)
    width = row_bytes(converted, plans, reads_files_only(df))
    with batches_for(df.sparkSession, width):
        content = RowFacts(packed_rows(converted, packs, spec.seed), packs, plans).content()
    _refuse_empty(content)
    _, fingerprint = _identity(df, plans, content, num_partitions, spec)
    return RowsFound(fingerprint, content.rows, f"the values of its {content.rows:,} rows")


def first_rows(df: DataFrame, spec: DataSpec, count: int) -> CachedPartition | None:
    """Return the first rows of a DataFrame as they would be stored; nothing is written.

    None where that takes long, where there are fewer, or where they are at fault, which `prepare`
    tells of all rows.

    Raises:
        ConfigurationError: a column is not there.
        DataError: a column is of a type that can't be used.
    """
    _check_arguments(df, 1, spec)
    plans, _, converted = _converted(df, spec)
    if not begins_at_once(df) or row_bytes(converted, plans, True) * count > _FIRST_BYTES:
        return None
    rows = converted.limit(count).collect()
    if len(rows) < count:
        return None
    arrays = []
    specs = []
    for position, plan in enumerate(plans):
        if plan.dtype in CELLS:
            cells = [row[position] for row in rows]
            if any(cell is None or (plan.dtype == "image" and not cell) for cell in cells):
                return None
            values = np.empty(count, numpy_dtype(plan.dtype))
            values[:] = [bytes(cell) for cell in cells]
            arrays.append(values)
            specs.append(ColumnSpec(plan.name, plan.dtype, ()))
            continue
        try:
            values = np.array([row[position] for row in rows], plan.dtype)
        except (TypeError, ValueError):  # null or ragged
            return None
        if values.ndim != 1 + plan.depth or not np.isfinite(values).all():
            return None
        arrays.append(values)
        specs.append(ColumnSpec(plan.name, plan.dtype, values.shape[1:]))
    return CachedPartition.of(specs, arrays, "row {} of the DataFrame".format)


def _converted(
    df: DataFrame, spec: DataSpec
) -> tuple[Sequence[ColumnPlan], Sequence[PackPlan], DataFrame]:
    """Return the columns, their packs, and the rows as they are stored, with their marks."""
    plans = [ColumnPlan.of(df, name, stored_name(i)) for i, name in enumerate(spec.columns)]
    marker = spec.validation_column
    flag = F.lit(False) if marker is None else validation_flag(df, marker)
    rows = df.select(*(plan.converted.alias(plan.stored) for plan in plans), flag.alias(FLAG))
    return plans, PackPlan.of(plans), rows


def _identity(
    df: DataFrame,
    plans: Sequence[ColumnPlan],
    content: Content,
    num_partitions: int,
    spec: DataSpec,
) -> tuple[tuple[ColumnSpec, ...], str]:
    """Return the columns as they are stored, and the fingerprint of the data."""
    columns = tuple(ColumnSpec(plan.name, plan.dtype, _shape(df, plan, content)) for plan in plans)
    found = fingerprint_of(columns, content.sums, num_partitions, spec.validation, spec.seed)
    return columns, found


def _prepared(
    df: DataFrame,
    store: Store,
    num_partitions: int,
    spec: DataSpec,
    tell: Callable[[str], None],
) -> Manifest:
    plans, packs, rows = _converted(df, spec)
    marker = spec.validation_column
    tell("checking rows")
    with ExitStack() as stack:
        rereadable = reads_files_only(df)
        width = row_bytes(rows, plans, rereadable)
        stack.enter_context(batches_for(df.sparkSession, width))
        if not rereadable:
            # So that what is checked is what is written, even if the query is random; on disk,
            # because a Java's memory may hold less than the rows.
            rows.persist(StorageLevel.DISK_ONLY)
            stack.callback(rows.unpersist)
        packed = packed_rows(rows, packs, spec.seed)
        row_facts = stack.enter_context(RowFacts(packed, packs, plans))
        content = row_facts.content()
        _refuse_faults(df, rows, plans, content, marker)
        columns, fingerprint = _identity(df, plans, content, num_partitions, spec)
        marked = None if marker is None else sum(content.counts[True])
        held_back = round(content.rows * spec.validation_share) if marked is None else marked
        has_validation = spec.validation is not None
        assignment = Assignment(content.rows, held_back, num_partitions, has_validation)

        def write(attempt: str) -> Manifest:
            tell(f"preparing {content.rows:,} rows in {num_partitions} partitions")
            chunks = _chunks(assignment, attempt, _most_rows(columns, content))
            ranges = row_facts.ranges(content, _sizes(chunks, marker is not None))
            job = WriteJob(
                store,
                store.data_path(fingerprint),
                tuple(chunks),
                _packs(packs, plans, columns),
                len(HASHES),
            )
            digests = _written(job, packed, packs, ranges)
            partitions = tuple(
                replace(info, digests=digests[info.split, info.index])
                for info in assignment.partitions(attempt)
            )
            return Manifest(fingerprint, columns, partitions)

        return prepare_once(store, fingerprint, write)


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
    if df.isStreaming:
        raise ConfigurationError(
            "the DataFrame is a stream, whose rows have no end; let a query write it to files, and "
            "give what spark.read makes of these"
        )


def _refuse_faults(
    df: DataFrame,
    rows: DataFrame,
    plans: Sequence[ColumnPlan],
    content: Content,
    marker: str | None,
) -> None:
    _refuse_empty(content)
    if content.suspects:
        for start in range(0, len(plans), _COLUMNS_LOOKED_AT):
            _refuse_columns(df, rows, plans[start : start + _COLUMNS_LOOKED_AT])
    unmarked = sum(content.counts[None])
    if marker is not None and unmarked:
        row = df.where(validation_flag(df, marker).isNull()).first()
        raise DataError(
            f"validation column {marker!r} is neither true nor false in {unmarked} "
            f"of {content.rows} rows, as in {_shown(row)}: fill it with true or false"
        )


def _refuse_empty(content: Content) -> None:
    if not content.rows:
        raise DataError("the DataFrame is empty: there are no rows to prepare")


def _refuse_columns(df: DataFrame, rows: DataFrame, plans: Sequence[ColumnPlan]) -> None:
    """Count the faults of some columns, where a row is suspected of one."""
    counts = [
        F.sum(condition.cast("bigint")).alias(f"{plan.stored}_fault_{i}")
        for plan in plans
        for i, condition in enumerate(plan.faults().values())
    ]
    (found,) = rows.agg(F.count(F.lit(1)).alias("rows"), *counts).collect()
    for plan in plans:
        for i, (fault, condition) in enumerate(plan.faults().items()):
            if count := found[f"{plan.stored}_fault_{i}"]:
                example = _example(df, plan, condition)
                raise decoder.faulty(plan.name, fault, example, (count, found["rows"]))


def _shape(df: DataFrame, plan: ColumnPlan, content: Content) -> tuple[int, ...]:
    """Return the shape that all rows of a column have."""
    lengths = content.lengths.get(plan.name, ())
    for dimension, (shortest, longest) in enumerate(lengths):
        if shortest != longest:
            short = plan.lengths()[dimension][0] == shortest
            example = _example(df, plan, short)
            raise decoder.ragged(plan.name, shortest, longest, dimension, example)
        if longest == 0:
            raise decoder.without_elements(plan.name)
    return tuple(longest for _, longest in lengths)


def _example(df: DataFrame, plan: ColumnPlan, condition: Column) -> str:
    row = df.withColumn(plan.stored, plan.converted).where(condition).drop(plan.stored).first()
    return _shown(row)


def _shown(row: Row | None) -> str:
    if row is None:
        return "a row that a second look did not find"
    values = (f"{name}={reprlib.repr(value)}" for name, value in row.asDict().items())
    return f"Row({', '.join(values)})"


def _most_rows(columns: Sequence[ColumnSpec], content: Content) -> int:
    """Return how many rows a chunk has at most."""
    width = sum(math.prod(each.shape) * numpy_dtype(each.dtype).itemsize for each in columns)
    width += sum(content.cell_bytes.values()) // max(1, content.rows)
    return max(1, _CHUNK_BYTES // width)


def _chunks(assignment: Assignment, attempt: str, most: int) -> list[Chunk]:
    """Return the chunks in the order of their ranges: those to validate on come first."""
    infos = assignment.partitions(attempt)
    return [
        chunk
        for split in ("val", "train")
        for info in infos
        if info.split == split
        for chunk in chunks_of(info, assignment.ids(split, info.index), most)
    ]


def _sizes(chunks: Sequence[Chunk], marked: bool) -> dict[bool, list[int]]:
    """Return the rows of the chunks by the mark of their rows; without marks none has it."""
    if not marked:
        return {False: [len(each.ids) for each in chunks]}
    splits = {True: "val", False: "train"}
    return {
        mark: [len(each.ids) for each in chunks if each.info.split == split]
        for mark, split in splits.items()
    }


def _packs(
    packs: Sequence[PackPlan], plans: Sequence[ColumnPlan], columns: Sequence[ColumnSpec]
) -> tuple[Pack, ...]:
    """Describe the packs to the writers."""
    position_of = {plan.stored: position for position, plan in enumerate(plans)}
    found = []
    for pack in packs:
        positions = tuple(position_of[plan.stored] for plan in pack.plans)
        alone = pack.plans[0].alone
        width = math.prod(columns[positions[0]].shape) if alone else len(positions)
        found.append(Pack(positions, pack.dtype, width, alone))
    return tuple(found)


def _written(
    job: WriteJob,
    packed: DataFrame,
    packs: Sequence[PackPlan],
    ranges: ChunkRanges,
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Write all rows, and return the content digests of each partition by split and index.

    A task writes one chunk, or one after the other where there are very many small ones.

    Raises:
        DataError: other rows reached a writer than were checked.
        StoreError: the store can't be written.
    """
    full = sum(len(each.ids) for each in job.chunks) // max(len(each.ids) for each in job.chunks)
    of_a_task = math.ceil(len(job.chunks) / max(_MANY_TASKS, full))
    tasks = math.ceil(len(job.chunks) / of_a_task)
    keys = F.expr(f"array({', '.join(map(str, shuffle_keys(tasks)))})")
    task = F.floor(F.col(CHUNK) / of_a_task).cast("int")
    chunks = (
        packed.select(*(pack.name for pack in packs), *HASHES, ranges.number.alias(CHUNK))
        .repartition(tasks, keys[task])
        .sortWithinPartitions(CHUNK, *HASHES)
    )
    with own_workers(packed.sparkSession.sparkContext):
        written = chunks.mapInArrow(job.outcome, OUTCOME)
    outcomes = written.collect()
    for outcome in outcomes:
        if outcome["error"] is not None:
            raise StoreError(outcome["error"])
    told = {outcome[CHUNK]: outcome for outcome in outcomes}
    digests: dict[tuple[str, int], tuple[int, ...]] = {}
    for number, each in enumerate(job.chunks):
        rows, sums = ranges.expected[number]
        found = told.get(number)
        arrived = (found["rows"], tuple(int(each, 16) for each in found["sums"])) if found else 0
        if found is None or arrived != (rows, sums):
            came = 0 if found is None else found["rows"]
            raise DataError(
                f"{came} rows came to a chunk of {each.info.split} partition "
                f"{each.info.index}, and {rows} were checked for it, or rows of other "
                "values: the query gives other rows when it is run again; write the DataFrame to "
                "files and prepare what spark.read makes of them"
            )
        partition, own = (each.info.split, each.info.index), found["digests"]
        before = digests.get(partition, (0,) * len(own))
        digests[partition] = tuple(
            (one + int(more, 16)) & _MASK for one, more in zip(before, own, strict=True)
        )
    return digests


_one_preparation = threading.Lock()


def row_bytes(rows: DataFrame, plans: Sequence[ColumnPlan], look: bool) -> int:
    """Estimate the bytes of a row.

    Args:
        rows: the converted rows.
        plans: their columns.
        look: whether the first row may be looked at, because that reads little.
    """
    wide = [plan for plan in plans if plan.alone]
    numbers = len(plans) - len(wide)
    if not wide:
        return _NUMBER_BYTES * numbers
    unknown = _UNKNOWN_BYTES * len(wide)
    if not look:
        return _NUMBER_BYTES * numbers + unknown
    sizes = (
        F.size(plan.flat()) * _NUMBER_BYTES if plan.depth else F.octet_length(plan.flat())
        for plan in wide
    )
    with batches_for(rows.sparkSession, _BATCH_BYTES):
        first = rows.select(*sizes).first()
    if first is None or any(size is None or size < 0 for size in first):
        return _NUMBER_BYTES * numbers + unknown
    return _NUMBER_BYTES * numbers + int(sum(first))


@contextmanager
def batches_for(session: SparkSession, width: int) -> Iterator[None]:
    """Let queries of the block take fewer rows at once, where rows of `width` bytes ask for that.

    Settings belong to the session, so that one preparation after another changes them.
    """
    most = max(1, _BATCH_BYTES // max(1, width))
    with _one_preparation:
        before = {name: session.conf.get(name, None) for name in _ROWS}
        changed = []
        try:
            for name, default in _ROWS.items():
                if most < int(before[name] or default):
                    session.conf.set(name, most)
                    changed.append(name)
            yield
        finally:
            for name in changed:
                value = before[name]
                if value is None:
                    session.conf.unset(name)
                else:
                    session.conf.set(name, value)
