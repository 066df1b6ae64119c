"""Surveys existing files before training: one pass over all rows finds faults and shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from cerebro_hydra.data import faults, row_store
from cerebro_hydra.data.column_decoder import DecodedColumn
from cerebro_hydra.data.manifest import Codec, ColumnSpec
from cerebro_hydra.data.parquet_files import metadata_of, read_range
from cerebro_hydra.errors import CerebroHydraError, DataError


@dataclass(frozen=True)
class ColumnRequest:
    """Names a column that existing files are asked for, with the dtype that it gets."""

    name: str
    dtype: str
    codec: Codec | None


@dataclass(frozen=True)
class SurveyTask:
    """Names consecutive rows of one file, which are surveyed at once."""

    path: str
    first: int
    rows: int
    columns: tuple[ColumnRequest, ...]


@dataclass
class ColumnSurvey:
    """Holds the faults and the shapes of a column's rows; rows are named in words."""

    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    """For each fault the number of rows that have it, and the first one."""
    lengths: list[tuple[int, int, str]] | None = None
    """For each dimension the shortest length, the longest one, and a row with the shortest."""
    first_row: str = ""
    """The first row that `lengths` is about."""


Survey = dict[str, ColumnSurvey]
"""What was found in each column."""
SurveyOutcome = Survey | CerebroHydraError
Mapper = Callable[
    [Callable[[SurveyTask], SurveyOutcome], Sequence[SurveyTask]], Iterable[SurveyOutcome]
]
"""Applies a function to tasks and gives the outcomes in order, perhaps in parallel on a cluster."""


def survey_tasks(paths: Sequence[str], columns: Sequence[ColumnRequest]) -> list[SurveyTask]:
    """Make one task of each row group of the files."""
    tasks = []
    for path in paths:
        metadata = metadata_of(path)
        first = 0
        for number in range(metadata.num_row_groups):
            rows = metadata.row_group(number).num_rows
            if rows:
                tasks.append(SurveyTask(path, first, rows, tuple(columns)))
            first += rows
    return tasks


def survey(task: SurveyTask) -> SurveyOutcome:
    """Read and decode every row of a task; an error is returned.

    Spark would try a task that raises again, and wrap what it raised.
    """
    found: Survey = {request.name: ColumnSurvey() for request in task.columns}
    first = task.first
    try:
        for batch in read_range(task.path, list(found), first, task.rows):
            where = partial(faults.row_of_file, task.path, first)
            for each in task.columns:
                decoded = row_store.decode(batch.column(each.name), each.codec, each.dtype)
                _merge(found[each.name], _column_survey(decoded, where), each.name)
            first += batch.num_rows
    except CerebroHydraError as error:
        return error
    return found


def specs_of(
    columns: Sequence[ColumnRequest], outcomes: Iterable[SurveyOutcome], rows: int
) -> tuple[ColumnSpec, ...]:
    """Return the columns with the shape that all rows have.

    Raises:
        DataError: rows can't be trained on: the message names the column, the number of rows and
            the first one. Or a file can't be read.
        SetupError: a worker lacks a package that reads the files.
    """
    total: Survey = {request.name: ColumnSurvey() for request in columns}
    for outcome in outcomes:
        if isinstance(outcome, CerebroHydraError):
            raise outcome
        for name, column in outcome.items():
            _merge(total[name], column, name)
    for request in columns:
        for fault, (count, example) in total[request.name].faults.items():
            raise faults.faulty(request.name, fault, example, (count, rows))
    return tuple(
        ColumnSpec(request.name, request.dtype, _shape(request.name, total[request.name]))
        for request in columns
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
