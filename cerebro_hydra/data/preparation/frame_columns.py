"""Converts a DataFrame's columns to those that are stored, and says which rows are at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.ml.functions import vector_to_array
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from cerebro_hydra.data import decoder
from cerebro_hydra.data.cells import CELLS, IMAGE_FIELDS, IMAGE_MODES, UNFIT_IMAGE
from cerebro_hydra.errors import DataError

_SPARK_TYPES = {"int64": "bigint", "float32": "float", "bool": "boolean"}
_RARE = 0x5BD1E9955BD1E995


def number_type(kind: T.DataType) -> tuple[str | None, int]:
    """Return the dtype of a Spark type's numbers, and how deep its arrays are nested.

    The dtype is None for what is no number, and the kind of `cells` for bytes and Spark's images.
    """
    if kind.simpleString() == "vector":
        return "float32", 1
    if isinstance(kind, T.BinaryType):
        return "binary", 0
    if isinstance(kind, T.StructType) and {*kind.names} == {*IMAGE_FIELDS}:
        return "image", 0
    depth = 0
    while isinstance(kind, T.ArrayType):
        kind, depth = kind.elementType, depth + 1
    families = {"bool": T.BooleanType, "int64": T.IntegralType, "float32": T.NumericType}
    dtypes = (dtype for dtype, family in families.items() if isinstance(kind, family))
    return next(dtypes, None), depth


def as_numbers(df: DataFrame, name: str, dtype: str) -> Column:
    """Convert a column of numbers, nested arrays of them, vectors, bytes or images to a dtype."""
    column, kind = column_of(name), df.schema[name].dataType
    if dtype in CELLS:
        return column if dtype == "binary" else _image_cells(column)
    if kind.simpleString() == "vector":
        # vector_to_array ends the job at a null, which is to be named with its row instead.
        return F.when(column.isNotNull(), vector_to_array(column, dtype))
    _, depth = number_type(kind)
    return column.cast("array<" * depth + _SPARK_TYPES[dtype] + ">" * depth)


def _image_cells(image: Column) -> Column:
    """Return images as cells; one that can't be used becomes an empty one, and null stays null."""
    height, width, channels = (image[name] for name in ("height", "width", "nChannels"))
    data = image["data"]
    known = F.lit(False)
    for mode, of_mode in IMAGE_MODES.items():
        known = known | ((image["mode"] == mode) & (channels == of_mode))
    size = height.cast("bigint") * width * channels
    usable = known & (height > 0) & (width > 0) & (F.octet_length(data) == size)
    numbers = (F.unhex(F.lpad(F.hex(each), 8, "0")) for each in (height, width, channels))
    cell = F.when(usable, F.concat(*numbers, data)).otherwise(F.lit(b""))
    return F.when(image.isNotNull(), F.coalesce(cell, F.lit(b"")))


def column_of(name: str) -> Column:
    escaped = name.replace("`", "``")
    return F.col(f"`{escaped}`")


def validation_flag(df: DataFrame, name: str) -> Column:
    kind = df.schema[name].dataType
    if not isinstance(kind, T.BooleanType | T.NumericType):
        raise DataError(
            f"validation column {name!r} is {kind.simpleString()}: it must be boolean, or hold 0 "
            "and 1"
        )
    column = column_of(name)
    if isinstance(kind, T.NumericType):
        # Anything else becomes null, which is refused with its row.
        column = F.when(column == 1, F.lit(True)).when(column == 0, F.lit(False))
    return column


@dataclass(frozen=True)
class ColumnPlan:
    """Converts one column; `depth` is its number of array dimensions."""

    name: str
    stored: str
    dtype: str
    depth: int
    converted: Column

    @staticmethod
    def of(df: DataFrame, name: str, stored: str) -> ColumnPlan:
        kind = df.schema[name].dataType
        dtype, depth = number_type(kind)
        if dtype is None:
            shown = kind.simpleString()
            raise decoder.unusable(name, shown, text=shown.replace("array<", "")[:6] == "string")
        return ColumnPlan(name, stored, dtype, depth, as_numbers(df, name, dtype))

    @property
    def alone(self) -> bool:
        """Return whether the column travels alone: one of arrays or bytes."""
        return self.depth > 0 or self.dtype in CELLS

    def levels(self) -> list[Column]:
        """Return the array with its outermost 0, 1, ... dimensions joined; the last one is flat."""
        levels = [F.col(self.stored)]
        for _ in range(self.depth - 1):
            levels.append(F.flatten(levels[-1]))
        return levels

    def flat(self) -> Column:
        return self.levels()[-1]

    def faults(self) -> dict[str, Column]:
        """Return for each fault the condition that a row has it."""
        levels = self.levels()
        null = levels[0].isNull()
        if self.depth:
            for level in levels:
                null = null | F.coalesce(F.exists(level, lambda x: x.isNull()), F.lit(False))
        found = {decoder.NULL: null}
        if self.dtype == "image":
            found[UNFIT_IMAGE] = F.octet_length(levels[0]) == 0
        if self.dtype == "float32":
            # Spark orders NaN above infinity, so that the extremes show every fault.
            low, high = levels[-1], levels[-1]
            if self.depth:
                low, high = F.array_min(low), F.array_max(high)
            infinity = F.lit(float("inf")).cast("float")
            infinite = F.isnan(high) | (high == infinity) | (low == -infinity)
            found[decoder.UNFIT["float32"]] = F.coalesce(infinite, F.lit(False))
        return found

    def lengths(self) -> list[tuple[Column, Column]]:
        """Return the shortest and the longest length in a row, for each dimension."""
        if not self.depth:
            return []
        outer = F.size(self.levels()[0])
        inner = [F.transform(level, lambda x: F.size(x)) for level in self.levels()[:-1]]
        return [(outer, outer), *((F.array_min(sizes), F.array_max(sizes)) for sizes in inner)]


@dataclass(frozen=True)
class PackPlan:
    """Puts columns into one column: one of arrays or bytes stays, all numbers of a dtype join."""

    name: str
    dtype: str
    plans: tuple[ColumnPlan, ...]

    @staticmethod
    def of(plans: Sequence[ColumnPlan]) -> list[PackPlan]:
        """Pack all columns; one of arrays or bytes stays alone."""
        scalars: dict[str, list[ColumnPlan]] = {}
        groups: list[list[ColumnPlan]] = []
        for plan in plans:
            if plan.alone:
                groups.append([plan])
            elif plan.dtype in scalars:
                scalars[plan.dtype].append(plan)
            else:
                groups.append(scalars.setdefault(plan.dtype, [plan]))
        return [
            PackPlan(f"pack_{i}", group[0].dtype, tuple(group)) for i, group in enumerate(groups)
        ]

    def packed(self) -> Column:
        """Return the array or bytes of a row; null, or with null in it, where a value is."""
        if self.plans[0].alone:
            return self.plans[0].flat()
        return F.array(*(F.col(plan.stored) for plan in self.plans))

    def suspect(self) -> Column:
        """Return a condition that every row with a fault has, and hardly any other.

        Each part is one loop over an array of numbers in compiled code; conditions that call a
        function for each number take many times as long.
        """
        array = F.col(self.name)
        if self.dtype in CELLS:
            empty = F.octet_length(array) == 0
            return array.isNull() | empty if self.dtype == "image" else array.isNull()
        if self.dtype != "float32":
            # The search of what is not there is null where the array has null. Somebody may have
            # the number: then the look at each column finds nothing.
            sought, kind = (_RARE, "bigint") if self.dtype == "int64" else (2, "int")
            searched = array if self.dtype == "int64" else array.cast("array<int>")
            return F.coalesce(F.array_contains(searched, F.lit(sought).cast(kind)), F.lit(True))
        nan, infinity = (F.lit(value).cast("float") for value in (float("nan"), float("inf")))
        found = F.array_contains(array, nan)
        found = found | (F.array_max(array) == infinity) | (F.array_min(array) == -infinity)
        return F.coalesce(found, F.lit(True))
