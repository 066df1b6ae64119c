"""Recognises tables whose own log says which of their Parquet files count.

Such a table keeps files of rows that were deleted or written again, so that nobody may read its
folder as plain Parquet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from cerebro_hydra.errors import DataError

_STREAMED = "_spark_metadata"

_LOGS: Mapping[str, tuple[str, str]] = {
    "_delta_log": ("Delta", "delta"),
    ".hoodie": ("Hudi", "hudi"),
    "metadata": ("Iceberg", "iceberg"),
    _STREAMED: ("streamed", "parquet"),
}
"""The name of each format and what Spark calls it, by the folder of its log."""

_ICEBERG = ".metadata.json"

_MOST_LINKS = 40
"""How many links Linux follows before it gives up a path."""

Names = Callable[[str], Iterable[str] | None]
"""Returns what is in a folder, or None if there is no such folder."""


def refuse_tables(
    files: Iterable[str], what: str, logs: Mapping[str, tuple[str, str]] = _LOGS
) -> None:
    """Refuse files of this machine that belong to such a table.

    Raises:
        DataError: one does; the message names the table, and how to read it.
    """
    paths = dict.fromkeys(spelling for file in files for spelling in _spellings(file))
    places = map(Path, dict.fromkeys(map(os.path.dirname, paths)))
    for folder in dict.fromkeys(str(each) for at in places for each in (at, *at.parents)):
        _refuse(folder, _names, what, logs)


def _spellings(path: str) -> Iterator[str]:
    """Yield a path as it is given, after each symbolic link on it, and where it ends."""
    yield os.path.realpath(path)
    at: str | None = os.path.abspath(path)
    for _ in range(_MOST_LINKS):
        if at is not None:
            yield at
            at = _followed(at)


def _followed(path: str) -> str | None:
    """Return a path without the first symbolic link on it; None if there is none."""
    for place in (*reversed(Path(path).parents), Path(path)):
        try:
            target = os.readlink(place)
        except OSError:
            continue
        return os.path.normpath(place.parent / target / os.path.relpath(path, place))
    return None


def refuse_tables_of_spark(
    urls: Iterable[str], names: Names, what: str, streamed: str | None
) -> None:
    """Refuse files which Spark would read without asking their table's log.

    Args:
        urls: of the files, wherever they are, as Spark spells them.
        names: lists a folder that is not on this machine.
        what: reads them, for the message.
        streamed: the format of files for whose streamed table Spark has not asked the log, which it
            only does for the table's own folder; None if it has.

    Raises:
        DataError: one belongs to such a table.
    """
    logs = {log: kind for log, kind in _LOGS.items() if log != _STREAMED}
    if streamed is not None:
        logs[_STREAMED] = ("streamed", streamed)
    here, elsewhere = [], dict[str, None]()
    for parts in map(urlsplit, urls):
        if parts.scheme in ("", "file"):
            here.append(unquote(parts.path))
            continue
        for at in PurePosixPath(unquote(parts.path)).parents:
            elsewhere[f"{parts.scheme}://{parts.netloc}{at}"] = None
    refuse_tables(here, what, logs)
    for folder in elsewhere:
        _refuse(folder, names, what, logs)


def _refuse(folder: str, names: Names, what: str, logs: Mapping[str, tuple[str, str]]) -> None:
    """Refuse a folder if it is the root of such a table."""
    there = names(folder) or ()
    for log, (name, read_as) in logs.items():
        if log not in there:
            continue
        if log == "metadata":
            found = names(f"{folder.rstrip('/')}/{log}") or ()
            if not any(_ICEBERG in each for each in found):
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
