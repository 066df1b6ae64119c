"""Surveys existing files before training: one pass finds faults and shapes, and digests values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from cerebro_hydra.data import faults, row_store
from cerebro_hydra.data.column_decoder import DecodedColumn
from cerebro_hydra.data.content_digest import ContentDigest
from cerebro_hydra.data.manifest import Codec, ColumnSpec, PartitionInfo, RowRange
from cerebro_hydra.data.parquet_files import read_range
from cerebro_hydra.data.row_ranges import split_mask
from cerebro_hydra.errors import CerebroHydraError, DataError


@dataclass(frozen=True)
class ColumnRequest:
    """Names a column that existing files are asked for, with the dtype that it gets."""

    name: str
    dtype: str
    codec: Codec | None


class FileRows(NamedTuple):
    """Names consecutive rows of one file."""

    path: str
    first: int
    rows: int


@dataclass(frozen=True)
class SurveyTask:
    """Names the rows of one partition, which are surveyed together."""

    columns: tuple[ColumnRequest, ...]
    rows: tuple[FileRows, ...]
    splits: tuple[PartitionInfo, ...] = ()
    """The partitions that these rows make: one, or where rows are held back one for each split."""
    seed: int | None = None
    """The seed that draws the rows held back."""


@dataclass
class ColumnSurvey:
    """Holds the faults and the shapes of a column's rows; rows are named in words."""

    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    """For each fault the number of rows that have it, and the first one."""
    lengths: list[tuple[int, int, str]] | None = None
    """For each dimension the shortest length, the longest one, and a row with the shortest."""
    first_row: str = ""
    """The first row that `lengths` is about."""


@dataclass
class Survey:
    """Holds what was found in the rows of a task, or of all tasks."""

    columns: dict[str, ColumnSurvey]
    digests: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    """The content digest of each column, by split and index of the partition."""


SurveyOutcome = Survey | CerebroHydraError
Mapper = Callable[
    [Callable[[SurveyTask], SurveyOutcome], Sequence[SurveyTask]], Iterable[SurveyOutcome]
]
"""Applies a function to tasks and gives the outcomes in order, perhaps in parallel on a cluster."""


def survey_tasks(
    paths: Sequence[str],
    columns: tuple[ColumnRequest, ...],
    partitions: Sequence[PartitionInfo],
    seed: int | None,
) -> list[SurveyTask]:
    """Make one task of the rows of each partition; both splits of a partition may share them."""
    splits: dict[tuple[RowRange, ...], list[PartitionInfo]] = {}
    for info in partitions:
        splits.setdefault(info.row_ranges, []).append(info)
    return [
        SurveyTask(
            columns,
            tuple(FileRows(paths[each.file], each.first, each.rows) for each in ranges),
            tuple(infos),
            seed,
        )
        for ranges, infos in splits.items()
    ]


def survey(task: SurveyTask) -> SurveyOutcome:
    """Read and decode every row of a task; an error is returned.

    Spark would try a task that raises again, and wrap what it raised.
    """
    found = Survey({request.name: ColumnSurvey() for request in task.columns})
    masks = [split_mask(info, task.seed) for info in task.splits]
    read = [ContentDigest(len(task.columns)) for _ in task.splits]
    start = 0
    try:
        for path, first, rows in task.rows:
            for batch in read_range(path, list(found.columns), first, rows):
                where = partial(faults.row_of_file, path, first)
                columns = [
                    row_store.decode(batch.column(each.name), each.codec, each.dtype)
                    for each in task.columns
                ]
                for each, decoded in zip(task.columns, columns, strict=True):
                    _merge(found.columns[each.name], _column_survey(decoded, where), each.name)
                stop = start + batch.num_rows
                if all(decoded.sound for decoded in columns):  # else an error is to come
                    ids = np.arange(start, stop)
                    arrays = [decoded.values.reshape(len(ids), -1) for decoded in columns]
                    for mask, digest in zip(masks, read, strict=True):
                        own = slice(None) if mask is None else mask[start:stop]
                        digest.add(ids[own], [array[own] for array in arrays])
                first += batch.num_rows
                start = stop
    except CerebroHydraError as error:
        return error
    for info, digest in zip(task.splits, read, strict=True):
        found.digests[info.split, info.index] = digest.digests
    return found


def survey_all(columns: Sequence[ColumnRequest], outcomes: Iterable[SurveyOutcome]) -> Survey:
    """Join what tasks found, in their order.

    Raises:
        DataError: a file can't be read, or columns have arrays of different dimensions.
        SetupError: a worker lacks a package that reads the files.
    """
    total = Survey({request.name: ColumnSurvey() for request in columns})
    for outcome in outcomes:
        if isinstance(outcome, CerebroHydraError):
            raise outcome
        for name, column in outcome.columns.items():
            _merge(total.columns[name], column, name)
        total.digests |= outcome.digests
    return total


def specs_of(columns: Sequence[ColumnRequest], found: Survey, rows: int) -> tuple[ColumnSpec, ...]:
    """Return the columns with the shape that all rows have.

    Raises:
        DataError: rows can't be trained on: the message names the column, the number of rows and
            the first one.
    """
    for request in columns:
        for fault, (count, example) in found.columns[request.name].faults.items():
            raise faults.faulty(request.name, fault, example, (count, rows))
    return tuple(
        ColumnSpec(request.name, request.dtype, _shape(request.name, found.columns[request.name]))
        for request in columns
    )


def digested(partitions: Sequence[PartitionInfo], found: Survey) -> tuple[PartitionInfo, ...]:
    """Return the partitions with the content digests that the survey made of them."""
    return tuple(
        replace(info, digests=found.digests[info.split, info.index]) for info in partitions
    )


def _shape(name: str, column: ColumnSurvey) -> tuple[int, ...]:
    lengths = column.lengths or []
    for dimension, (shortest, longest, example) in enumerate(lengths):
        if shortest != longest:
            raise faults.ragged(name, shortest, longest, dimension, example)
        if longest == 0:
            raise faults.without_elements(name)
    return tuple(longest for _, longest, _ in lengths)


def _column_survey(decoded: DecodedColumn, where: Callable[[int], str]) -> ColumnSurvey:
    wrong = {fault: (len(rows), where(int(rows[0]))) for fault, rows in decoded.faults.items()}
    if wrong and not decoded.values.size:
        return ColumnSurvey(wrong)  # nothing is left that could have a length
    lengths = [(each.shortest, each.longest, where(each.row)) for each in decoded.lengths]
    return ColumnSurvey(wrong, lengths, where(0))


def _merge(into: ColumnSurvey, other: ColumnSurvey, name: str) -> None:
    for fault, (count, example) in other.faults.items():
        before, earlier = into.faults.get(fault, (0, example))
        into.faults[fault] = (before + count, earlier)
    if other.lengths is None:
        return
    if into.lengths is None:
        into.lengths, into.first_row = other.lengths, other.first_row
        return
    if len(into.lengths) != len(other.lengths):
        raise DataError(
            f"column {name!r} has arrays of {len(into.lengths)} dimensions in {into.first_row} "
            f"and of {len(other.lengths)} in {other.first_row}: write all with one shape"
        )
    into.lengths = [
        (min(a, b), max(c, d), earlier if a <= b else later)
        for (a, c, earlier), (b, d, later) in zip(into.lengths, other.lengths, strict=True)
    ]
