"""Takes a table of pandas or polars, or a path, where a DataFrame of Spark goes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq

from cerebro_hydra.data.preparation.csv_files import CSV, refuse_other_file, refuse_other_rows
from cerebro_hydra.data.preparation.table_formats import Names, refuse_tables_of_spark
from cerebro_hydra.data.tables import arrow_table, is_table
from cerebro_hydra.errors import ConfigurationError, DataError, SetupError
from cerebro_hydra.storage.local_paths import local_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ARROW = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
}

_OF_SPARK = "org.apache.spark.sql.execution.datasources."
_LISTED, _LOGGED = ".InMemoryFileIndex", ".MetadataLogFileIndex"
"""Spark's indexes of the files in folders, and of those that the log of a streamed table names."""

_OF_PARQUET = (b"PAR1", b"PARE")
_GLOB = re.compile(r"[\[\]{}*?\\]")
"""What Spark takes for a pattern in a path."""


def dataframe_of(given: Any, session: Callable[[], SparkSession | None]) -> DataFrame | Any:
    """Return a DataFrame of Spark for a table or a path; anything else as it is.

    A path is a folder or file of Parquet, or a file of CSV with a header.

    Raises:
        ConfigurationError: there is nothing at the path, or it is of another kind.
        DataError: a column of the table can't become one of Spark.
        SetupError: there is no Spark session.
    """
    by_path = isinstance(given, str | os.PathLike)
    if not by_path and not is_table(given):
        return given
    spark = session()
    if spark is None:
        raise SetupError("there is no Spark session; start one, such as by local_spark()")
    return _read(spark, str(given)) if by_path else _made(spark, given)


def _made(spark: SparkSession, given: Any) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    table = arrow_table(given)
    before = {name: spark.conf.get(name) for name in _ARROW}
    try:
        for name, value in _ARROW.items():
            spark.conf.set(name, value)
        return spark.createDataFrame(table.to_pandas(), from_arrow_schema(table.schema))
    except TypeError as error:
        raise DataError(f"the table can't become a DataFrame of Spark: {error}") from error
    finally:
        for name, old in before.items():
            spark.conf.set(name, str(old))


def _read(spark: SparkSession, path: str) -> DataFrame:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    here = local_path("the path", path)
    url, root, names, what = path, path, _lister(spark), f"the path {path!r}"
    if here is not None and os.path.exists(here):
        _refuse_hidden_file(here)
        url = "file://" + _GLOB.sub(r"\\\g<0>", os.path.realpath(here))
        root = quote(here)
    try:
        if path.lower().endswith((".csv", ".csv.gz")):
            if here is not None and os.path.isfile(here):
                refuse_other_file(here)
            found = spark.read.csv(url, inferSchema=True, **CSV)
            refuse_tables_of_spark([root, *found.inputFiles()], names, what, "csv")
            refuse_other_rows(spark, url, found, what)
            return found
        if here is not None:
            _refuse_other_file(here)
        # Before Spark stumbles over the log; then where a pattern, a link or a partition led.
        refuse_tables_of_spark([f"{root}/any"], names, what, None)
        if here is not None:
            _refuse_other_files_within(here)
        found = spark.read.parquet(url)
        streamed = None if _asked_the_log(found) else "parquet"
        refuse_tables_of_spark([root, *found.inputFiles()], names, what, streamed)
        return found
    except (Py4JError, PySparkException) as error:
        said = str(getattr(error, "java_exception", error)) or type(error).__name__
        raise ConfigurationError(
            f"{path!r} can't be read as Parquet or CSV: {said.splitlines()[0]}; give the "
            "path of a folder or file of Parquet, or of a file that ends in .csv and has a header"
        ) from error


def _refuse_hidden_file(path: str) -> None:
    name = os.path.basename(path)
    if name[:1] in ("_", ".") and os.path.isfile(path):
        raise ConfigurationError(
            f"the file {path!r} has a name that begins with {name[0]!r}, and Spark reads no such "
            "file; give it another name"
        )


def _refuse_other_file(path: str) -> None:
    """Refuse a file that is no Parquet, of which Java would write hundreds of lines."""
    if os.path.isfile(path) and (begin := _begin(path)) not in _OF_PARQUET:
        raise ConfigurationError(
            f"{path!r} is neither Parquet, for it begins with {begin!r}, nor named as CSV; give "
            "the path of a folder or file of Parquet, or of a file that ends in .csv and has a "
            "header"
        )


def _refuse_other_files_within(path: str) -> None:
    """Refuse such files in a folder, and other values of a column than names of folders give it.

    Spark would take those of the names. It passes over empty files.
    """
    seen = set[str]()
    for folder, folders, files in os.walk(path, followlinks=True):
        seen.add(os.path.realpath(folder))
        inner = {name: os.path.realpath(os.path.join(folder, name)) for name in folders}
        folders[:] = [name for name, place in inner.items() if "=" in name and place not in seen]
        names = (each.partition("=") for each in folder.removeprefix(path).split(os.sep))
        by_name = {unquote(name).lower(): unquote(value) for name, mark, value in names if mark}
        for name in (name for name in files if not name.startswith((".", "_"))):
            file = os.path.join(folder, name)
            begin = b"" if name.endswith("._COPYING_") else _begin(file)
            if begin and begin not in _OF_PARQUET:
                raise ConfigurationError(
                    f"{file!r} is no Parquet, for it begins with {begin!r}; take it out of the "
                    "folder, or begin its name with _, as Spark reads no such file"
                )
            if begin == b"PAR1" and by_name:
                _refuse_other_values(file, by_name)


def _refuse_other_values(file: str, by_name: Mapping[str, str]) -> None:
    try:
        whole = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"{file!r} is not a whole Parquet file ({error}): write the data again"
        ) from error
    columns = [whole.schema.column(n).path for n in range(whole.num_columns)]
    for number, column in enumerate(columns):
        if (named := by_name.get(column.lower())) is None:
            continue
        groups = (whole.row_group(n).column(number).statistics for n in range(whole.num_row_groups))
        if any(each is None or {str(each.min), str(each.max)} != {named} for each in groups):
            raise ConfigurationError(
                f"{file!r} has other values of column {column!r} than the name of its folder, "
                f"which is {named!r}; write the file without that column"
            )


def _begin(path: str) -> bytes:
    """Return by what a file is known, which may be read; else what Spark is to say why not."""
    try:
        with open(path, "rb") as file:
            return file.read(4)
    except OSError:
        return b"PARE"


def refuse_tables_as_files(df: DataFrame) -> None:
    """Refuse a query over files of a table whose log Spark has not asked which of them count.

    Whoever reads such a table by its own format has other files, or asks another index for them.

    Raises:
        DataError: it reads one; the message names the table, and how to read it.
    """
    for urls, streamed in _indexed(df):
        refuse_tables_of_spark(urls, _lister(df.sparkSession), "the DataFrame", streamed)


def _indexed(df: DataFrame) -> list[tuple[list[str], str | None]]:
    """Return the files of each of Spark's own indexes in a query, and what they would be read as.

    None in place of the latter where the index has asked the log of a streamed table. Nothing if
    Spark can't be asked, as on a cluster that lets Python call little of it.
    """
    from py4j.protocol import Py4JError

    found: list[tuple[list[str], str | None]] = []
    try:
        plan = df._jdf.queryExecution().analyzed()
        plans = [plan, *_all(plan.subqueriesAll())]
        for leaf in (leaf for each in plans for leaf in _all(each.collectLeaves())):
            index, form = _files_of(leaf) or (None, "")
            kind = "" if index is None else index.getClass().getName()
            if index is None or not kind.startswith(_OF_SPARK):
                continue
            # An index of a catalog has not listed its files yet, which may be of many partitions.
            roots = index.rootPaths()
            urls = [f"{roots.apply(at)}/any" for at in range(roots.size())]
            urls += index.inputFiles() if kind.endswith(_LISTED) else []
            found.append((urls, None if kind.endswith(_LOGGED) else form))
    except Py4JError:
        return []
    return found


def _all(found: Any) -> Iterator[Any]:
    """Yield what is in a sequence of Java."""
    return map(found.apply, range(found.size()))


def _files_of(leaf: Any) -> tuple[Any, str] | None:
    """Return Spark's index of the files that a leaf of a plan reads, and their format."""
    kind = leaf.getClass().getSimpleName()
    if kind == "LogicalRelation":
        relation = leaf.relation()
        if not relation.getClass().getName().endswith(".HadoopFsRelation"):
            return None
        form = relation.fileFormat().getClass().getSimpleName()
        return relation.location(), form.removesuffix("FileFormat").lower()
    if kind == "DataSourceV2Relation":
        table = leaf.table().getClass()
        if table.getSuperclass().getSimpleName() == "FileTable":
            return leaf.table().fileIndex(), table.getSimpleName().removesuffix("Table").lower()
    return None


def _asked_the_log(df: DataFrame) -> bool:
    """Say whether Spark reads the files that the log of a streamed table names."""
    leaf = df._jdf.queryExecution().analyzed().collectLeaves().apply(0)
    if leaf.nodeName() != "LogicalRelation":  # as where the session reads Parquet by version 2
        return False
    return bool(leaf.relation().location().getClass().getName().endswith(_LOGGED))


def _lister(spark: SparkSession) -> Names:
    """Return what lists a folder, wherever Spark finds it."""
    from py4j.protocol import Py4JError

    jvm: Any = spark._jvm
    configuration = spark._jsc.hadoopConfiguration()  # type: ignore[attr-defined]

    def names(folder: str) -> list[str] | None:
        path = jvm.org.apache.hadoop.fs.Path(folder)
        try:
            found = path.getFileSystem(configuration).listStatus(path)
        except Py4JError:  # it is not there, or nobody may look into it
            return None
        return [each.getPath().getName() for each in found]

    return names
