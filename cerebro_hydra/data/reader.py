"""Defines the contract of readers of a partition's Parquet files, and chooses one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Protocol

from numpy.typing import NDArray

from cerebro_hydra.data import decoder, petastorm_reader
from cerebro_hydra.data.parquet import ArrowReader, ParquetFolder
from cerebro_hydra.data.petastorm_reader import PetastormReader
from cerebro_hydra.errors import DataError


class Reader(Protocol):
    """Reads every row of a folder once, in stored order, with the dtypes that are stored.

    `testing/reader_case.py` says in tests what that means; a reader is used by one thread.
    """

    name: str
    """The reader and its version, as users are told."""

    def groups(
        self, folder: ParquetFolder, columns: Sequence[str]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield for each row group its columns, of shape (rows,), or (rows, length) for lists.

        Bytes are an array of bytes objects.

        Raises:
            DataError: a row is null, holds null, or has another length than others of its group.
        """
        ...


@cache
def chosen_reader() -> Reader:
    """Return petastorm's reader where this process can use petastorm, else Arrow's."""
    return PetastormReader() if petastorm_reader.obstacle() is None else ArrowReader()


def reader_title() -> str:
    """Name the reader that this process uses, with the reason if it is not petastorm's."""
    why = petastorm_reader.obstacle()
    return chosen_reader().name + (f" ({why})" if why else "")


def read_columns(
    path: str, columns: Sequence[str], reader: Reader | None = None
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the rows of a folder in stored order, one row group after another.

    Files come in the order of their names. Each item has for every column an array of shape
    (rows of the group,), or (rows, length) for a column of lists; no item is without rows. Arrays
    may be read-only.

    Args:
        path: the folder.
        columns: names without a leading underscore, which petastorm could not read.
        reader: the reader to use instead of `chosen_reader`.

    Raises:
        DataError: the folder can't be read, lacks a column, or has null or lists of different
            lengths.
    """
    for name in columns:
        if not name.isidentifier() or name.startswith("_"):
            raise DataError(
                f"column {name!r} can't be read by every reader: names in the files are Python "
                "identifiers without a leading underscore; rename it"
            )
    folder = ParquetFolder.open(path, columns)
    reader = reader or chosen_reader()
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for group in reader.groups(folder, columns):
            rows = {len(values) for values in group.values()}
            if len(rows) > 1:
                raise DataError(f"{reader.name} gave columns of {sorted(rows)} rows in {path!r}")
            if rows == {0}:
                continue
            for name, values in group.items():
                if shapes.setdefault(name, values.shape[1:]) != values.shape[1:]:
                    lengths = sorted((shapes[name][0], values.shape[1]))
                    raise decoder.ragged(name, lengths[0], lengths[1], 0, repr(path))
            yield group
    except DataError:
        raise
    except Exception as error:
        # Whatever petastorm or pyarrow raises here means the same to the user.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{reader.name} can't read {list(columns)} from {path!r} ({reason}): prepare the data "
            "again"
        ) from error
