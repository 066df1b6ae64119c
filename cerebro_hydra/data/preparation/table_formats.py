"""Recognises tables whose own log says which of their Parquet files count.

Such a table keeps files of rows that were deleted or written again, so that nobody may read its
folder as plain Parquet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cerebro_hydra.errors import DataError

_LOGS: Mapping[str, tuple[str, str]] = {
    "_delta_log": ("Delta", "delta"),
    ".hoodie": ("Hudi", "hudi"),
    "metadata": ("Iceberg", "iceberg"),
    "_spark_metadata": ("streamed", "parquet"),
}
"""The name of each format and what Spark calls it, by the folder of its log."""

_ICEBERG = ".metadata.json"

Names = Callable[[str], Iterable[str] | None]
"""Returns what is in a folder, or None if there is no such folder."""


def refuse_tables(files: Iterable[str], what: str) -> None:
    """Refuse files of this machine that belong to such a table.

    Raises:
        DataError: one does; the message names the table, and how to read it.
    """
    folders = dict.fromkeys(map(os.path.dirname, files))
    places = [Path(seen(each)) for seen in (os.path.realpath, os.path.abspath) for each in folders]
    for folder in dict.fromkeys(str(each) for at in places for each in (at, *at.parents)):
        _refuse(folder, _names, what, _LOGS)


def refuse_tables_of_spark(folders: Iterable[str], names: Names, what: str) -> None:
    """Refuse folders which Spark would read as plain Parquet; it knows its own streamed ones.

    Raises:
        DataError: one is such a table.
    """
    logs = {log: kind for log, kind in _LOGS.items() if kind[1] != "parquet"}
    for folder in folders:
        _refuse(folder, names, what, logs)


def _refuse(folder: str, names: Names, what: str, logs: Mapping[str, tuple[str, str]]) -> None:
    """Refuse a folder if it is the root of such a table."""
    for log, (name, read_as) in logs.items():
        found = names(f"{folder.rstrip('/')}/{log}")
        if found is None or (log == "metadata" and not any(_ICEBERG in each for each in found)):
            continue
        raise DataError(
            f"{what} has files of the {name} table {folder!r}, which may hold deleted rows beside "
            f"those that count; read it by spark.read.format({read_as!r}).load({folder!r}), and "
            "give that to backend.prepare_data"
        )


def _names(folder: str) -> Iterable[str] | None:
    try:
        return os.listdir(folder)
    except OSError:
        return None
