"""Takes a table of pandas or polars, or a path, where a DataFrame of Spark goes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cerebro_hydra.data.preparation.table_formats import Names, refuse_tables_of_spark
from cerebro_hydra.data.tables import arrow_table, is_table
from cerebro_hydra.errors import ConfigurationError, DataError, SetupError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ARROW = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
}


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
    from pyspark.errors import AnalysisException

    here = Path(path)
    url = f"file://{here.resolve()}" if "://" not in path and here.exists() else path
    try:
        if path.lower().endswith((".csv", ".csv.gz")):
            return spark.read.csv(url, header=True, inferSchema=True)
        refuse_tables_of_spark(*_folders(spark, url), f"the path {path!r}")
        return spark.read.parquet(url)
    except AnalysisException as error:
        raise ConfigurationError(
            f"{path!r} can't be read as Parquet or CSV: {str(error).splitlines()[0]}; give the "
            "path of a folder or file of Parquet, or of a file that ends in .csv and has a header"
        ) from error


def _folders(spark: SparkSession, url: str) -> tuple[list[str], Names]:
    """Return a path and the folders around it, and what lists one, wherever Spark finds them."""
    from py4j.protocol import Py4JJavaError

    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(url)
    try:
        files = path.getFileSystem(spark._jsc.hadoopConfiguration())  # type: ignore[attr-defined]
    except Py4JJavaError:  # Spark says why when it reads
        return [], lambda folder: None
    path, folders = files.makeQualified(path), []
    while path is not None:
        folders.append(path.toString())
        path = path.getParent()

    def names(folder: str) -> list[str] | None:
        try:
            found = files.listStatus(jvm.org.apache.hadoop.fs.Path(folder))
        except Py4JJavaError:  # it is not there, or nobody may look into it
            return None
        return [each.getPath().getName() for each in found]

    return folders, names
