"""Recognises tables whose own log says which of their Parquet files count.

Such a table keeps files of rows that were deleted or written again, so that nobody may read its
folder as plain Parquet.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from cerebro_hydra.errors import DataError

_STREAMED = "_spark_metadata"


class _Format(NamedTuple):
    name: str
    read_as: str  # by Spark
    has: str = ""  # what is the name of a file in its log, as a pattern
    beside: str = ""  # what else its folder has


_LOGS: Mapping[str, _Format] = {
    "_delta_log": _Format("Delta", "delta"),
    ".hoodie": _Format("Hudi", "hudi"),
    "metadata": _Format("Iceberg", "iceberg", r"(v\d+|\d+-.*)(\.gz)?\.metadata\.json(\.gz)?"),
    "manifest": _Format("Paimon", "paimon", r"manifest-.*", "snapshot"),
    _STREAMED: _Format("streamed", "parquet"),
}
"""Formats by the folder of their log, which lies in that of the table."""

_OF_HIVE = re.compile(r"(base_\d{7}|(delete_)?delta_\d{7}_\d{7}(_\d{4})?)(_v\d+)?")
_IN_HIVE = re.compile(r"(bucket_\d{5}|\d{6}_\d+).*")
"""The folder that a write to a transactional table of Hive makes, and a file in it."""

_COMMITTED = "_committed_"
"""How Databricks begins the name of a file that says what a write added and removed."""

_WRITTEN = re.compile(r"-tid-(\d+)-")
"""The number of the write that made a file of theirs."""

_MOST_LINKS = 40
"""How many links Linux follows before it gives up a path."""

Names = Callable[[str], Iterable[str] | None]
"""Returns what is in a folder, or None if there is no such folder."""


def refuse_tables(files: Iterable[str], what: str, logs: Mapping[str, _Format] = _LOGS) -> None:
    """Refuse files of this machine that belong to such a table.

    Raises:
        DataError: one does; the message names the table, and how to read it.
    """
    paths = dict.fromkeys(spelling for file in files for spelling in _spellings(file))
    inner = dict[str, list[str]]()
    for path in paths:
        inner.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
    places = map(Path, inner)
    for folder in dict.fromkeys(str(each) for at in places for each in (at, *at.parents)):
        _refuse(folder, _names, what, logs)
    for folder, names in inner.items():
        _refuse_writes_of_hive(folder, names, what)
        _refuse_replaced(folder, names, what)


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
        logs[_STREAMED] = _Format("streamed", streamed)
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


def _refuse(folder: str, names: Names, what: str, logs: Mapping[str, _Format]) -> None:
    """Refuse a folder if it is the root of such a table."""
    there = names(folder) or ()
    for log, (name, read_as, has, beside) in logs.items():
        if log not in there or (beside and beside not in there):
            continue
        within = names(f"{folder.rstrip('/')}/{log}") or () if has else ()
        if has and not any(re.fullmatch(has, each) for each in within):
            continue
        raise DataError(
            f"{what} has files of the {name} table {folder!r}, which may hold deleted rows beside "
            f"those that count; read it by spark.read.format({read_as!r}).load({folder!r}), and "
            "give that to backend.prepare_data"
        )


def _refuse_writes_of_hive(folder: str, files: Iterable[str], what: str) -> None:
    at = PurePosixPath(folder)
    if _OF_HIVE.fullmatch(at.name) and any(map(_IN_HIVE.fullmatch, files)):
        raise DataError(
            f"{what} has files of the transactional Hive table {str(at.parent)!r}, which may hold "
            "deleted rows beside those that count; let Hive write these to a folder of their own "
            "(INSERT OVERWRITE DIRECTORY ... STORED AS PARQUET), and give its path"
        )


def _refuse_replaced(folder: str, files: Iterable[str], what: str) -> None:
    """Refuse files in a folder that a later write by Databricks has replaced, or one left behind.

    Its own Spark asks the files that tell of it; others don't.
    """
    there = frozenset(_names(folder) or ())
    replaced = dict[str, str]()
    for each in sorted(name for name in there if name.startswith(_COMMITTED)):
        replaced |= dict.fromkeys(_removed(os.path.join(folder, each)), each)
    for file in files:
        number = found.group(1) if (found := _WRITTEN.search(file)) else ""
        left = f"_started_{number}" in there and f"{_COMMITTED}{number}" not in there
        if file in replaced or left:
            why = f"{replaced[file]} removed" if file in replaced else "no _committed_ file names"
            raise DataError(
                f"{what} has {os.path.join(folder, file)!r}, which {why}: its rows don't count; "
                "read the folder by spark.read.parquet on Databricks, and give that to "
                "backend.prepare_data, or delete such files by VACUUM there"
            )


def _removed(path: str) -> list[str]:
    """Return which files a write removed, as far as a file tells it."""
    if not os.path.isfile(path):
        return []
    try:
        told = json.loads(Path(path).read_bytes())
        return [str(each) for each in told["removed"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def _names(folder: str) -> Iterable[str] | None:
    try:
        return os.listdir(folder)
    except OSError:
        return None
