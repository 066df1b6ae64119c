"""Takes a table of pandas or polars, or a path, where a DataFrame of Spark goes.

Neither library is imported here: whoever gives a table has imported its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cerebro_hydra.errors import ConfigurationError, DataError, SetupError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ARROW = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
}

# What Spark has no type for becomes the next larger type that it has.
_TYPES = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(), pa.large_string(): pa.string(),
}  # fmt: skip


def is_table(given: Any) -> bool:
    """Return whether something is a DataFrame of pandas or polars."""
    return _library(given) is not None and type(given).__name__ in ("DataFrame", "LazyFrame")


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


def arrow_table(given: Any, names: Sequence[str] | None = None) -> pa.Table:
    """Return columns of a table of pandas or polars, in types that Spark has; None takes all.

    Raises:
        DataError: a column is missing, or holds values of several kinds.
    """
    given = collected(given)
    found = [*map(str, given.columns)]
    for name in names or ():
        if name not in found:
            raise DataError(f"feature column {name!r} is not in the table, which has {found}")
    columns: dict[str, pa.Array] = {}
    for name in found if names is None else names:
        values = given[name]
        try:
            column = values.to_arrow() if _library(given) == "polars" else _array(values)
            columns[name] = column.cast(_spark_type(column.type))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise DataError(
                f"column {name!r} can't become a column of Arrow ({error}); give numbers, or lists "
                "or arrays of them that have one shape in all rows"
            ) from error
    return pa.table(columns)


def with_columns(given: Any, added: dict[str, pa.Array]) -> Any:
    """Return a table of the same library with columns added; rows and their index stay.

    Args:
        given: a table that is `collected`.
    """
    if _library(given) == "polars":
        made = sys.modules["polars"]
        return given.with_columns(made.from_arrow(a).alias(n) for n, a in added.items())
    return given.assign(**{n: a.to_pandas().set_axis(given.index) for n, a in added.items()})


def collected(given: Any) -> Any:
    """Return a table with its rows: what a LazyFrame of polars gives, any other as it is."""
    return given.collect() if type(given).__name__ == "LazyFrame" else given


def _library(given: Any) -> str | None:
    library = type(given).__module__.partition(".")[0]
    return library if library in ("pandas", "polars") else None


def _array(values: Any) -> pa.Array:
    """Return a column of pandas; Arrow takes no array of several dimensions as a value."""
    first = values.iloc[0] if len(values) else None
    if getattr(first, "ndim", 1) > 1:
        values = values.map(lambda value: value.tolist())
    if str(values.dtype) == "float16":  # Arrow casts no halves
        values = values.astype("float32")
    array = pa.Array.from_pandas(values)
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _spark_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _spark_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_spark_type(kind.value_type))
    return _TYPES.get(kind, kind)


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
    url = here.resolve().as_uri() if "://" not in path and here.exists() else path
    try:
        if path.lower().endswith((".csv", ".csv.gz")):
            return spark.read.csv(url, header=True, inferSchema=True)
        return spark.read.parquet(url)
    except AnalysisException as error:
        raise ConfigurationError(
            f"{path!r} can't be read as Parquet or CSV: {str(error).splitlines()[0]}; give the "
            "path of a folder or file of Parquet, or of a file that ends in .csv and has a header"
        ) from error
