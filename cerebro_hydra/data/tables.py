"""Turns tables of pandas or polars into tables of Arrow, and adds columns to them.

Neither library is imported here: whoever gives a table has imported its own.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from cerebro_hydra.errors import DataError

# What Spark has no type for becomes the next larger type that it has.
_TYPES = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(), pa.large_string(): pa.string(), pa.large_binary(): pa.binary(),
}  # fmt: skip


def is_table(given: Any) -> bool:
    """Return whether something is a DataFrame of pandas or polars."""
    return _library(given) is not None and type(given).__name__ in ("DataFrame", "LazyFrame")


def arrow_table(given: Any, names: Sequence[str] | None = None) -> pa.Table:
    """Return columns of a table of pandas or polars, in types that Spark has; None takes all.

    Raises:
        DataError: a column is missing, or holds values of several kinds.
    """
    given = collected(given)
    found = [*map(str, given.columns)]
    if twice := [name for name in dict.fromkeys(found) if found.count(name) > 1]:
        raise DataError(
            f"column {twice[0]!r} is {found.count(twice[0])} times in the table, as {found}: "
            "rename or drop all but one"
        )
    for name in names or ():
        if name not in found:
            raise DataError(f"feature column {name!r} is not in the table, which has {found}")
    columns: dict[str, pa.Array] = {}
    for name in found if names is None else names:
        try:
            if _library(given) == "polars":
                column = given[name].to_arrow()
            else:  # by its place, because the name of a column of pandas may be no string
                column = _array(given.iloc[:, found.index(name)])
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
    for method in ("toArray", "asDict", "numpy"):  # vectors and rows of Spark, tensors of torch
        if hasattr(first, method):
            values = values.map(operator.methodcaller(method), na_action="ignore")
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
