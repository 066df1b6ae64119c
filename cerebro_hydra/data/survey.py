"""One pass over the rows of existing files, before training: are they fit, and of what shape?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro_hydra.data import faults, row_store
from cerebro_hydra.data.cells import Cells, cells_of
from cerebro_hydra.data.manifest import Codec, ColumnSpec
from cerebro_hydra.data.parquet_files import metadata_of, read_range
from cerebro_hydra.errors import CerebroHydraError, DataError


@dataclass(frozen=True)
class ColumnRequest:
    """A column to survey."""

    name: str
    dtype: str
    codec: Codec | None


@dataclass(frozen=True)
class Stretch:
    """Consecutive rows of one file, surveyed at once."""

    path: str
    first: int
    rows: int
    columns: tuple[ColumnRequest, ...]


Place = tuple[str, int]
"""A file and a row in it."""


@dataclass
class ColumnSurvey:
    """What one column is like; of each fault its number of rows and the first one."""

    faults: dict[str, tuple[int, Place]] = field(default_factory=dict)
    lengths: list[tuple[int, int, Place]] | None = None
    """Shortest, longest, and where the shortest is, in each dimension."""
    at: Place = ("", 0)
    """The first row that `lengths` is of."""


Findings = dict[str, ColumnSurvey]
Surveyed = Findings | CerebroHydraError
Mapper = Callable[[Callable[[Stretch], Surveyed], Sequence[Stretch]], Iterable[Surveyed]]
"""Applies a function to items, in order; a cluster may do so in parallel."""


def stretches(paths: Sequence[str], columns: Sequence[ColumnRequest]) -> list[Stretch]:
    """Cut files at their row groups."""
    found = []
    for path in paths:
        metadata = metadata_of(path)
        first = 0
        for number in range(metadata.num_row_groups):
            rows = metadata.row_group(number).num_rows
            if rows:
                found.append(Stretch(path, first, rows, tuple(columns)))
            first += rows
    return found


def survey(stretch: Stretch) -> Surveyed:
    """Read and decode every row of a stretch; an error is returned.

    Spark would try a task that raises again, and wrap what it raised.
    """
    try:
        return _surveyed(stretch)
    except CerebroHydraError as error:
        return error


def _surveyed(stretch: Stretch) -> Findings:
    found: Findings = {request.name: ColumnSurvey() for request in stretch.columns}
    first = stretch.first
    for batch in read_range(stretch.path, list(found), first, stretch.rows):
        for request in stretch.columns:
            array = batch.column(request.name)
            if request.codec is None:
                cells = cells_of(array, request.dtype)
            else:
                cells = row_store.decode(array, request.codec, request.dtype)
            _join(found[request.name], _finding(cells, stretch.path, first), request.name)
        first += batch.num_rows
    return found


def specs_of(
    columns: Sequence[ColumnRequest], surveyed: Iterable[Surveyed], rows: int
) -> tuple[ColumnSpec, ...]:
    """The columns with the shape that all rows have.

    Raises:
        DataError: rows can't be trained on; names the column, their number and the first one. Or
            a file can't be read.
        SetupError: what reads them is not on a worker.
    """
    total: Findings = {request.name: ColumnSurvey() for request in columns}
    for findings in surveyed:
        if isinstance(findings, CerebroHydraError):
            raise findings
        for name, finding in findings.items():
            _join(total[name], finding, name)
    for request in columns:
        for fault, (count, place) in total[request.name].faults.items():
            raise faults.faulty(request.name, fault, count, rows, _shown(place))
    return tuple(
        ColumnSpec(request.name, request.dtype, _shape(request.name, total[request.name]))
        for request in columns
    )


def _shape(name: str, finding: ColumnSurvey) -> tuple[int, ...]:
    lengths = finding.lengths or []
    for dimension, (shortest, longest, place) in enumerate(lengths):
        if shortest != longest:
            raise faults.ragged(name, shortest, longest, dimension, _shown(place))
        if longest == 0:
            raise faults.without_elements(name)
    return tuple(longest for _, longest, _ in lengths)


def _finding(cells: Cells, path: str, first: int) -> ColumnSurvey:
    wrong = {
        fault: (len(rows), (path, first + int(rows[0]))) for fault, rows in cells.faults.items()
    }
    if len(cells.faults) and not cells.values.size:
        return ColumnSurvey(wrong)  # nothing is left that could have a length
    lengths = [(each.shortest, each.longest, (path, first + each.row)) for each in cells.lengths]
    return ColumnSurvey(wrong, lengths, (path, first))


def _join(into: ColumnSurvey, other: ColumnSurvey, name: str) -> None:
    for fault, (count, place) in other.faults.items():
        before, earlier = into.faults.get(fault, (0, place))
        into.faults[fault] = (before + count, earlier)
    if other.lengths is None:
        return
    if into.lengths is None:
        into.lengths, into.at = other.lengths, other.at
        return
    if len(into.lengths) != len(other.lengths):
        raise DataError(
            f"column {name!r} has arrays of {len(into.lengths)} dimensions in {_shown(into.at)} "
            f"and of {len(other.lengths)} in {_shown(other.at)}: write all with one shape"
        )
    into.lengths = [
        (min(a, b), max(c, d), where if a <= b else there)
        for (a, c, where), (b, d, there) in zip(into.lengths, other.lengths, strict=True)
    ]


def _shown(place: Any) -> str:
    path, row = place
    return f"row {row} of {os.path.normpath(path)!r}"
