"""Finds rows of CSV that Spark would cut, swallow or take for others."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from cerebro_hydra.errors import DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# As RFC 4180 says: cells in quotes may hold ends of lines, and quotes that are written twice.
CSV: dict[str, Any] = {"header": True, "multiLine": True, "escape": '"'}
"""The options by which Spark reads it."""

_END = "\0end\n"
"""A line behind the last one, which is in a cell of its file if quotes there are not closed."""


def refuse_other_file(path: str) -> None:
    """Refuse a file that is named as CSV and is something else, or is damaged.

    Raises:
        DataError: it is.
    """
    is_compressed = path.lower().endswith(".gz")
    with open(path, "rb") as file:
        begin = file.read(4)
    if begin == b"PAR1" or (begin[:2] == b"\x1f\x8b") != is_compressed:
        raise DataError(
            f"{path!r} is named as CSV{' that gzip compressed' * is_compressed} and begins with "
            f"{begin!r}; give it the name of what it is: .parquet, .csv or .csv.gz"
        )
    try:
        with _text(path) as text:
            while text.read(1 << 20) and is_compressed:
                pass
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path!r} is damaged: {error}; compress its rows again") from error


def refuse_other_rows(spark: SparkSession, url: str, found: DataFrame, what: str) -> None:
    """Refuse rows that are not what the file says.

    Args:
        url: as Spark read it.
        found: what it read.
        what: names it in errors.

    Raises:
        DataError: there are some, or none at all; the message names the first one.
    """
    files = list(map(urlsplit, found.inputFiles()))
    are_here = all(each.scheme == "file" for each in files)
    local = [_LocalFile(unquote(each.path)) for each in files if are_here]
    with _long_cells():
        for each in local:
            each.look()
        for each in local[1:]:
            each.refuse_other_header(local[0])
        _refuse_longer_rows(spark, url, found, what)
    rows = found.count()
    if not rows:  # all of whose columns would be texts
        raise DataError(f"{what} has no rows below its header")
    there = sum(each.rows for each in local)
    if local and rows != there and not any(each.has_blank_rows for each in local):
        raise DataError(
            f"{what} has {there} rows, of which Spark reads {rows}; look for quotes within cells "
            "that are not in quotes, and write them twice within quotes"
        )


class _LocalFile:
    """Counts the rows of a file, which may be compressed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._header: list[str] = []
        self.rows = 0
        self.has_blank_rows = False
        """Whether there are rows of white space, of which readers make something or nothing."""

    def look(self) -> None:
        """Read the file once.

        Raises:
            DataError: quotes are not closed, so that a cell would have all rows from there.
        """
        last: list[str] = []
        with _text(self._path) as file:
            for row in csv.reader(itertools.chain(file, ["\n", _END])):
                last = row
                self.rows += bool(row)
                self.has_blank_rows |= len(row) == 1 and not row[0].strip()
                self._header = self._header or row
        if last != [_END.strip()]:
            raise DataError(
                f"{self._path!r} has quotes in row {self.rows - 1} that are never closed; close "
                "them, or write them twice within quotes"
            )
        self.rows -= 2  # the header, and the end

    def refuse_other_header(self, first: _LocalFile) -> None:
        """Refuse columns in another order or of other names, as all files are read by the first.

        Raises:
            DataError: they differ.
        """
        if self._header != first._header:
            raise DataError(
                f"{self._path!r} begins with {self._header}, and {first._path!r} with "
                f"{first._header}; files that are read together need one header, in one order"
            )


def _refuse_longer_rows(spark: SparkSession, url: str, found: DataFrame, what: str) -> None:
    """Refuse a row with more cells than the header, such as `1,5` for 1.5, which Spark cuts.

    Raises:
        DataError: there is one.
    """
    from pyspark.sql.types import StringType, StructField, StructType

    mark = max(["_record", *(f"{name}_" for name in found.columns)], key=len)
    schema = StructType([*found.schema.fields, StructField(mark, StringType())])
    rows = spark.read.csv(url, schema=schema, columnNameOfCorruptRecord=mark, **CSV)
    for row in rows.where(rows[mark].isNotNull()).toLocalIterator():
        cells = max(map(len, csv.reader(io.StringIO(row[mark], newline=""))), default=0)
        if cells > len(found.columns):  # of fewer, those that are missing are null
            raise DataError(
                f"{what} has the row {row[mark][:200]!r} of {cells} cells under a header of "
                f"{len(found.columns)}; put cells that hold a comma into quotes, write decimals "
                "with a point, and end no row with a comma"
            )


@contextmanager
def _long_cells() -> Iterator[None]:
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _text(path: str) -> IO[str]:
    opened: Any = gzip.open if path.lower().endswith(".gz") else open
    file: IO[str] = opened(path, "rt", encoding="utf-8", errors="replace", newline="")
    return file
