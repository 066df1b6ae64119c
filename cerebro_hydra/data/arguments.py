"""Checks the DataFrames and names of columns that callers give."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cerebro_hydra.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def column_names(argument: str, value: Any) -> tuple[str, ...]:
    """Return the value of an argument that lists columns.

    Raises:
        ConfigurationError: it is no list of names, or names one twice.
    """
    if isinstance(value, str):
        raise ConfigurationError(f"{argument} is {value!r}; give a list: [{value!r}]")
    if not isinstance(value, Sequence) or not value:
        raise ConfigurationError(f"{argument} is {value!r}; give a list of column names")
    for name in value:
        if not isinstance(name, str):
            raise ConfigurationError(f"{argument} holds {name!r}; column names are strings")
        if list(value).count(name) > 1:
            raise ConfigurationError(f"{argument} names {name!r} more than once; name it once")
    return tuple(value)


def require_dataframe(caller: str, df: Any) -> None:
    """Refuse an argument that is not a DataFrame of Spark.

    Raises:
        ConfigurationError: it is something else; the message says what.
    """
    if not isinstance(getattr(df, "columns", None), list):
        raise ConfigurationError(
            f"{caller} got a {type(df).__module__}.{type(df).__name__}; give a Spark DataFrame, "
            "such as spark.createDataFrame(...) makes"
        )


def matching_columns(df: DataFrame, name: str) -> list[str]:
    """Return the columns that Spark takes `name` for; it refuses a query if there are several."""
    if df.sparkSession.conf.get("spark.sql.caseSensitive") == "true":
        return [each for each in df.columns if each == name]
    return [each for each in df.columns if each.lower() == name.lower()]


def column_problem(df: DataFrame, name: str, what: str) -> str | None:
    """Say why a DataFrame does not have exactly one column of a name; None if it has.

    Args:
        df: the DataFrame.
        name: the column's name, in the case that the caller wrote.
        what: how the message calls the column, as in "feature column".
    """
    if name not in df.columns:
        return missing_column(what, name, "the DataFrame", df.columns)
    matching = matching_columns(df, name)
    if len(matching) > 1:
        return (
            f"{what} {name!r} is {len(matching)} times in the DataFrame, as {matching}: rename or "
            "drop all but one"
        )
    return None


def missing_column(what: str, name: str, where: str, columns: Sequence[str]) -> str:
    """Say that a column is not among those that there are, with the nearest of them."""
    near = difflib.get_close_matches(name, columns, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{what} {name!r} is not in {where}{hint}, which has the columns {list(columns)}"
