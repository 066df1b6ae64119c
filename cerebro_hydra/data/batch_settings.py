"""Bounds the rows that Spark takes at once, which it counts without a look at their bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from cerebro_hydra.data.frame_columns import ColumnPlan

_BATCH_BYTES = 8 << 20
_UNKNOWN_BYTES = 64 << 10  # of an array, where a look at one would run a query
_NUMBER_BYTES = 8
_ROWS = {
    "spark.sql.parquet.columnarReaderBatchSize": 4096,
    "spark.sql.orc.columnarReaderBatchSize": 4096,
    "spark.sql.inMemoryColumnarStorage.batchSize": 10_000,
    "spark.sql.execution.arrow.maxRecordsPerBatch": 10_000,
}
"""Spark's settings of rows at once, with its defaults."""

_one_preparation = threading.Lock()


def row_bytes(rows: DataFrame, plans: Sequence[ColumnPlan], look: bool) -> int:
    """Estimate the bytes of a row.

    Args:
        rows: the converted rows.
        plans: their columns.
        look: whether the first row may be looked at, because that reads little.
    """
    nested = [plan for plan in plans if plan.depth]
    numbers = len(plans) - len(nested)
    if not nested:
        return _NUMBER_BYTES * numbers
    unknown = _UNKNOWN_BYTES * len(nested)
    if not look:
        return _NUMBER_BYTES * numbers + unknown
    with batches_for(rows.sparkSession, _BATCH_BYTES):
        first = rows.select(*(F.size(plan.flat()) for plan in nested)).first()
    if first is None or any(size is None or size < 0 for size in first):
        return _NUMBER_BYTES * numbers + unknown
    return _NUMBER_BYTES * (numbers + sum(first))


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
