"""Tells whether a query reads files and nothing else, and which: their names, sizes and times."""

from __future__ import annotations

import json
import os
import re
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from py4j.protocol import Py4JError
from pyspark.sql import DataFrame

from cerebro_hydra.data.checked_sources import File

# What gives the same rows again from the same input, a row at a time.
_OPERATORS = ("Project", "Filter", "SubqueryAlias", "View", "Union")
_SOURCES = ("LogicalRelation", "Range", "LocalRelation", "OneRowRelation")
_UNSTEADY = re.compile(
    r"^Current|^Now$|^LocalTimestamp|UDF|Udf|^Rand|^Uuid|^Shuffle|Query|Subquery|InputFile"
    r"|^MonotonicallyIncreasingID$|^SparkPartitionID$|Invoke|^CallMethodViaReflection$"
)
_OWN_SETTINGS = (
    "spark.sql.warehouse.dir",
    "spark.sql.shuffle.partitions",
    "spark.sql.execution.arrow.pyspark.enabled",
)
"""Settings of Spark SQL that change no row."""
_CLASS = re.compile(r'"class":"([^"]*)"')
_JVM = re.compile(r'"jvmId":"[^"]*"')


class SourceFiles(NamedTuple):
    """Describes a query over files: all that decides its rows."""

    query: str
    """Its plan, without names that Spark draws anew each time."""
    files: tuple[File, ...]


def reads_files_only(df: DataFrame) -> bool:
    """Say whether a query reads files, or makes numbers, row by row, and gives the same again."""
    nodes = _nodes(df)
    return nodes is not None and all(map(_is_steady, nodes))


def source_files(df: DataFrame) -> SourceFiles | None:
    """Return the query and its files; None if anything else may change its rows, or can't be seen.

    Only files of this machine and of mounted file systems are looked at.
    """
    nodes = _nodes(df)
    if nodes is None or not all(map(_is_steady, nodes)):
        return None
    plan = _plan(df)
    leaves = plan.collectLeaves()
    sources = []
    for leaf in map(leaves.apply, range(leaves.size())):
        if leaf.nodeName() != "LogicalRelation":
            return None
        relation = leaf.relation()
        if not relation.getClass().getName().endswith(".HadoopFsRelation"):
            return None
        schema = f"{relation.dataSchema().json()} {relation.partitionSchema().json()}"
        form = relation.fileFormat().getClass().getName()
        sources.append(f"{form} {relation.options().toString()} {schema}")
    canonical = plan.canonicalized()
    settings = df.sparkSession.sql("SET").collect()
    query = {
        "plan": _JVM.sub("", canonical.toJSON()),
        "shown": canonical.toString(),  # has the modes of casts, which the other leaves out
        "columns": df.schema.json(),
        "sources": sources,
        "settings": sorted(
            (row["key"], row["value"])
            for row in settings
            if row["key"].startswith("spark.sql.") and row["key"] not in _OWN_SETTINGS
        ),
        "version": df.sparkSession.version,
    }
    files = _stated(sorted(df.inputFiles()))
    return None if not files else SourceFiles(json.dumps(query), files)


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


def _plan(df: DataFrame) -> Any:
    # With what the user has cached, which may be older than the files.
    return df._jdf.queryExecution().withCachedData()


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
