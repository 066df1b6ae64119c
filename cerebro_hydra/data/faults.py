"""What can be wrong with columns, in the same words wherever rows come from."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

NULL = "is null, or holds null"
UNFIT = {
    "float32": "holds NaN, infinity, or a number beyond float32",
    "int64": "holds a number beyond int64",
}
"""By the column's type: what a number must not be."""


def found(
    dtype: str, null: NDArray[np.int64], unfit: NDArray[np.int64]
) -> dict[str, NDArray[np.int64]]:
    """Rows by fault, each once, without the faults that no row has."""
    rows = {NULL: np.unique(null), UNFIT.get(dtype, ""): np.unique(unfit)}
    return {fault: each for fault, each in rows.items() if each.size}


def column_names(argument: str, value: Any) -> tuple[str, ...]:
    """The value of an argument that lists columns.

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
    """Refuse what is no DataFrame of Spark.

    Raises:
        ConfigurationError: it is something else; says what.
    """
    if not isinstance(getattr(df, "columns", None), list):
        raise ConfigurationError(
            f"{caller} got a {type(df).__module__}.{type(df).__name__}; give a Spark DataFrame, "
            "such as spark.createDataFrame(...) makes"
        )


def named_like(df: DataFrame, name: str) -> list[str]:
    """The columns that a query for `name` means; if there are several, it is refused by Spark."""
    if df.sparkSession.conf.get("spark.sql.caseSensitive") == "true":
        return [each for each in df.columns if each == name]
    return [each for each in df.columns if each.lower() == name.lower()]


def not_there(what: str, name: str, where: str, columns: Sequence[str]) -> str:
    """A column is not among those that there are."""
    near = difflib.get_close_matches(name, columns, n=1, cutoff=0.4)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{what} {name!r} is not in {where}{hint}, which has the columns {list(columns)}"


def unusable(name: str, kind: str, text: bool) -> DataError:
    """A column's type is none that training can use."""
    remedy = "drop it, or turn it into numbers first"
    if text:
        remedy = "turn text into numbers first, with StringIndexer or a tokenizer"
    return DataError(
        f"column {name!r} is {kind}: columns are numbers, booleans, arrays of them, or Spark ML "
        f"vectors; {remedy}"
    )


def faulty(name: str, fault: str, count: int, rows: int, example: str) -> DataError:
    """Some rows of a column can't be trained on."""
    return DataError(
        f"column {name!r} {fault} in {count} of {rows} rows, as in {example}: fill or drop such "
        "rows"
    )


def ragged(name: str, shortest: int, longest: int, dimension: int, example: str) -> DataError:
    """The rows of a column have several shapes."""
    return DataError(
        f"column {name!r} has arrays of different lengths, from {shortest} to {longest} in "
        f"dimension {dimension}; one of {shortest} is in {example}: pad or cut them to one length"
    )


def without_elements(name: str) -> DataError:
    """The arrays of a column have length 0."""
    return DataError(f"column {name!r} holds empty arrays: drop the column")
