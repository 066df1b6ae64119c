"""Tells whether a query reads files and nothing else, and which: their names, sizes and times.

What the rows of such files became is remembered, so that they need not be read again.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.preparation.prepared import digest_of, find_prepared
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.documents import decode
from cerebro_hydra.errors import StoreError
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.digest import decode_document, encode_document
from cerebro_hydra.storage.names import Digest

# What gives the same rows again from the same input, a row at a time.
_OPERATORS = ("Project", "Filter", "SubqueryAlias", "View", "Union")
_SOURCES = ("LogicalRelation", "Range", "LocalRelation", "OneRowRelation")
_STREAMED = (*_OPERATORS, *_SOURCES, "LogicalRDD", "InMemoryRelation", "GlobalLimit", "LocalLimit")
"""What gives its first rows at once."""
_UNSTEADY = re.compile(
    r"^Current|^Now$|^LocalTimestamp|UDF|Udf|^Rand|^Uuid|^Shuffle|Query|Subquery|InputFile"
    r"|^Exists$|^MonotonicallyIncreasingID$|^SparkPartitionID$|Invoke|^CallMethodViaReflection$"
)
_MOST_FIELDS = "spark.sql.debug.maxToStringFields"
_OWN_SETTINGS = (
    _MOST_FIELDS,
    "spark.sql.warehouse.dir",
    "hive.metastore.warehouse.dir",
    "spark.sql.shuffle.partitions",
    "spark.sql.execution.arrow.pyspark.enabled",
)
"""Settings of Spark SQL and Hadoop that change no row."""
_BY_DEFAULT = "spark.sql.session.timeZone", "spark.sql.ansi.enabled"
"""What Java's time zone and the environment decide where no session does."""
_DAYS = re.compile(r"\b(?:now|today|tomorrow|yesterday)\b", re.IGNORECASE)
"""Is another time each day where Spark makes a time of it."""
_TIMES = re.compile(r'"(?:timestamp|timestamp_ntz|date)"')
_PARSES = re.compile(r"Cast$|ToStructs$|^ParseTo|^TryTo|ToTimestamp|GetTimestamp|UnixTimestamp")
"""Expressions that may make a time of a text; of a time of day it is one of the present day."""
_OF_TEXT = ("CSVFileFormat", "JsonFileFormat", "XmlFileFormat")
_ID = re.compile(r"#(\d+)")
_CLASS = re.compile(r'"class":"([^"]*)"')
_JVM = re.compile(r'"jvmId":"[^"]*"')
_CUT = re.compile(r"\.\.\. -?\d+ more (?:fields|characters)|^Truncated plan of ")
"""What stands in the text of a plan for the rest of it."""

_LISTED = re.compile(
    r"^\w*FileStatus\{path=(?:file:)?(.*?); isDirectory=false; length=(\d+); .*?"
    r"modification_time=(\d+); ",
    re.MULTILINE,
)
"""Tells the path, the bytes, and the milliseconds of the last change of a file that Spark knows."""

_FOLDER = "sources"
_SETTLED_SECONDS = 2.0  # a file that is younger may change without its time


class SourceFiles(NamedTuple):
    """Describes a query over files: all that decides its rows."""

    query: str
    """Its plan, without names that Spark draws anew each time."""
    files: tuple[File, ...]


def reads_files_only(df: DataFrame) -> bool:
    """Say whether a query reads files, or makes numbers, row by row, and gives the same again."""
    nodes = _nodes(df)
    return nodes is not None and all(map(_is_steady, nodes))


def begins_at_once(df: DataFrame) -> bool:
    """Say whether a query has its first rows without reading all of what it is made from."""
    try:
        names = _CLASS.findall(_plan(df).toJSON())
    except Py4JError:
        return False
    operators = (name.rpartition(".")[2] for name in names if ".expressions" not in name)
    return all(name in _STREAMED for name in operators)


def source_files(df: DataFrame) -> SourceFiles | None:
    """Return the query and its files; None if anything else may change its rows, or can't be seen.

    Only files of this machine and of mounted file systems are looked at.
    """
    try:
        return _source_files(df)
    except Py4JError:
        return None  # some sources of others can't be asked


def _source_files(df: DataFrame) -> SourceFiles | None:
    nodes, session = _nodes(df), df.sparkSession
    if nodes is None or not all(map(_is_steady, nodes)):
        return None
    plan = _plan(df)
    leaves = plan.collectLeaves()
    sources, listed = [], list[str]()
    for leaf in map(leaves.apply, range(leaves.size())):
        if leaf.nodeName() != "LogicalRelation":
            return None
        relation = leaf.relation()
        if not relation.getClass().getName().endswith(".HadoopFsRelation"):
            return None
        if leaf.catalogTable().isDefined() and relation.partitionSchema().length():
            return None  # the catalog says what stands in which folder
        schema = f"{relation.dataSchema().json()} {relation.partitionSchema().json()}"
        form = relation.fileFormat().getClass().getName()
        location = relation.location()
        roots = location.rootPaths().mkString(" ")  # several are not in the options
        sources.append(f"{form} {relation.options().toString()} {schema} {roots}")
        listed.append(location.allFiles().mkString("\n"))
    canonical = plan.canonicalized()
    text = _JVM.sub("", canonical.toJSON())
    makes_times = any(form in source for source in sources for form in _OF_TEXT)
    makes_times |= any(_PARSES.search(name.rpartition(".")[2]) for name in nodes)
    makes_times &= bool(_TIMES.search(text + " ".join(sources)))
    # Has the order of sums, the options of from_csv, and try_cast; the JSON has none of them.
    with _whole_texts(session):
        shown = plan.toString()
    if _CUT.search(shown) or _DAYS.search(shown):
        return None
    settings = {row["key"]: row["value"] for row in session.sql("SET").collect()}
    settings |= {key: session.conf.get(key) for key in _BY_DEFAULT}
    query = {
        "plan": text,
        "day": _day_of(session) if makes_times else None,
        "shown": _numbered(shown),
        "columns": df.schema.json(),
        "sources": sources,
        "settings": sorted(
            (key, value)
            for key, value in settings.items()
            if key.startswith("spark.sql.") and key not in _OWN_SETTINGS
        ),
        "hadoop": _settings_of_hadoop(df),
        "zone": _zone_of_java(session),  # by which ORC reads times
        "version": session.version,
    }
    files = _stated(sorted(df.inputFiles()))
    if not files or _as_listed(files) != {*_LISTED.findall("\n".join(listed))}:
        return None  # some have changed since Spark has looked how long they are
    return SourceFiles(json.dumps(query), files)


def _day_of(session: SparkSession) -> str:
    """Return the present day where the session is."""
    java = session._jvm
    assert java is not None
    zone = session.conf.get("spark.sql.session.timeZone")
    of = java.org.apache.spark.sql.catalyst.util.DateTimeUtils.getZoneId(zone)
    return str(java.java.time.LocalDate.now(of).toString())


def _numbered(plan: str) -> str:
    """Return the text of a plan with ids of its own for those that Spark draws anew each time."""
    ids = dict[str, int]()
    return _ID.sub(lambda each: f"#{ids.setdefault(each[1], len(ids))}", plan)


def _settings_of_hadoop(df: DataFrame) -> dict[str, str]:
    """Return what decides how files are read, beside the settings of Spark."""
    java = df.sparkSession._jvm
    assert java is not None
    written = java.java.io.StringWriter()
    hadoop = df._jdf.sparkSession().sessionState().newHadoopConf()
    java.org.apache.hadoop.conf.Configuration.dumpConfiguration(hadoop, written)
    found = {each["key"]: each["value"] for each in json.loads(written.toString())["properties"]}
    return {
        key: found[key]
        for key in sorted(found)
        if not key.startswith("spark.") and key not in _OWN_SETTINGS
    }


def _zone_of_java(session: SparkSession) -> str:
    java = session._jvm
    assert java is not None
    return str(java.java.util.TimeZone.getDefault().getID())


_one_text = threading.Lock()


@contextmanager
def _whole_texts(session: SparkSession) -> Iterator[None]:
    """Let Java's texts of plans name all fields, however many the session says.

    Settings belong to the session, so that one thread after another changes this one.
    """
    java = session._jvm
    assert java is not None
    # Expressions ask these themselves, whatever number of fields their plan is told.
    settings = java.org.apache.spark.sql.internal.SQLConf.get()
    with _one_text:
        before = settings.getConfString(_MOST_FIELDS) if settings.contains(_MOST_FIELDS) else None
        try:
            settings.setConfString(_MOST_FIELDS, str(10**9))
            yield
        finally:
            if before is None:
                settings.unsetConf(_MOST_FIELDS)
            else:
                settings.setConfString(_MOST_FIELDS, before)


def _stated(urls: list[str]) -> tuple[File, ...]:
    """Return what the file system says of files; nothing if it can't be asked."""
    files = []
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("", "file"):
            return ()
        try:
            found = os.stat(unquote(parts.path))
        except OSError:
            return ()
        files.append((url, found.st_size, found.st_mtime_ns))
    return tuple(files)


def _as_listed(files: Iterable[File]) -> set[tuple[str, str, str]]:
    """Return the files as Spark lists them, which it does when a table is named."""
    return {
        (unquote(urlsplit(url).path), str(size), str(time // 10**6)) for url, size, time in files
    }


def _plan(df: DataFrame) -> Any:
    # With what the user has cached by now, which may be older than the files.
    return df.select("*")._jdf.queryExecution().withCachedData()


def _nodes(df: DataFrame) -> list[str] | None:
    """Return the classes of all operators and expressions; None if Spark can't tell."""
    try:
        plan = _plan(df)
        if not plan.deterministic():
            return None
        return _CLASS.findall(plan.toJSON())
    except Py4JError:
        return None  # some operators of others have no text


def _is_steady(name: str) -> bool:
    """Say whether a node gives the same rows again."""
    package, _, short = name.rpartition(".")
    if ".expressions" in package:
        return not _UNSTEADY.search(short)
    return short in _OPERATORS or short in _SOURCES


File = tuple[str, int, int]
"""URL, bytes, and time of the last change in nanoseconds."""


@dataclass(frozen=True)
class _Checked:
    fingerprint: Digest
    at: float


class CheckedSource:
    """Names a preparation by all that decides its rows.

    Args:
        store: of the prepared data.
        query: the text of the query.
        files: those that it reads.
        num_partitions: of the data.
        spec: of the data.
    """

    def __init__(
        self,
        store: Store,
        query: str,
        files: tuple[File, ...],
        num_partitions: int,
        spec: DataSpec,
    ) -> None:
        """Look at nothing yet."""
        name = digest_of(
            query=query,
            files=files,
            num_partitions=num_partitions,
            columns=spec.columns,
            validation=spec.validation,
            seed=spec.seed,
        )
        self._store, self._path = store, f"{store.prefix}/{_FOLDER}/{name}.json"
        self._settled = time.time() - max(time for *_, time in files) / 1e9 > _SETTLED_SECONDS

    def find(self) -> tuple[Manifest, str] | None:
        """Return the data that these files became, and when they were read; None if unknown."""
        if not self._store.exists(self._path):
            return None
        try:
            document: Any = decode_document(self._path, self._store.read(self._path))
            checked = decode(_Checked, document, "the note of what files became")
        except StoreError:
            return None  # whoever reads the rows writes another
        manifest = find_prepared(self._store, checked.fingerprint)
        if manifest is None:
            return None
        return manifest, f"{datetime.fromtimestamp(checked.at):%Y-%m-%d %H:%M}"

    def remember(self, manifest: Manifest) -> None:
        """Note what the files became, if none of them is so new that it may still be written."""
        if self._settled:
            document = {"fingerprint": manifest.fingerprint, "at": time.time()}
            self._store.write(self._path, encode_document(document))
