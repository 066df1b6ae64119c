"""Columns of a DataFrame to tensors and back, by way of Arrow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cerebro_hydra.data import faults
from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_SPARK_NAMES = {"float32": "float", "int64": "bigint", "bool": "boolean"}


def feature(df: DataFrame, spec: ColumnSpec) -> Column:
    """A feature column with the type that its model was trained with.

    Vectors, dense or sparse, and floats become float32, integers int64.

    Raises:
        DataError: the column is missing or there twice, or its type can't become that without loss.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions

    if spec.name not in df.columns:
        raise DataError(
            f"feature column {spec.name!r} is not in the DataFrame, which has {df.columns}"
        )
    alike = faults.named_like(df, spec.name)
    if len(alike) > 1:
        raise DataError(
            f"feature column {spec.name!r} is {len(alike)} times in the DataFrame, as {alike}; "
            "rename or drop all but one"
        )
    column = functions.col(f"`{spec.name.replace('`', '``')}`")
    data_type = df.schema[spec.name].dataType
    depth, element = _leaf(data_type)
    if depth != len(spec.shape) or not _fits(element, spec.dtype):
        raise DataError(
            f"feature column {spec.name!r} is {data_type.simpleString()}, and the model was "
            f"trained with {spec.dtype} of shape {spec.shape} per row; cast it to that"
        )
    if data_type.typeName() == "vectorudt" or data_type.simpleString() == "vector":
        # vector_to_array ends the job at a null, which is to be named instead.
        return functions.when(column.isNotNull(), vector_to_array(column, spec.dtype))
    target = _SPARK_NAMES[spec.dtype]
    for _ in range(depth):
        target = f"array<{target}>"
    return column.cast(target)


def _leaf(data_type: DataType) -> tuple[int, str]:
    """How deep a type's arrays are nested, and the name of what they hold."""
    from pyspark.sql.types import ArrayType

    depth = 0
    while isinstance(data_type, ArrayType):
        depth, data_type = depth + 1, data_type.elementType
    name = data_type.simpleString()
    return (depth + 1, "float") if name == "vector" else (depth, name)


def _fits(element: str, dtype: str) -> bool:
    integer = element in ("tinyint", "smallint", "int", "bigint")
    if dtype == "bool":
        return element == "boolean"
    if dtype == "int64":
        return integer
    return integer or element in ("float", "double") or element.startswith("decimal")


def to_tensor(array: pa.Array, spec: ColumnSpec) -> Tensor:
    """An Arrow column as a tensor of shape (rows, *spec.shape).

    Raises:
        DataError: a value is null, NaN or infinite, or a row has another shape.
    """
    import pyarrow.compute as pc

    rows = len(array)
    for size in spec.shape:
        _refuse_nulls(array, spec)
        lengths = pc.unique(pc.list_value_length(array)).to_pylist()
        if lengths not in ([], [size]):
            raise DataError(
                f"feature column {spec.name!r} has rows with {sorted(lengths)} entries where the "
                f"model was trained with shape {spec.shape} per row; give all rows that shape"
            )
        array = array.flatten()
    _refuse_nulls(array, spec)
    values = torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    if values.is_floating_point() and not bool(values.isfinite().all()):
        raise DataError(
            f"feature column {spec.name!r} has NaN or infinity (in float32); drop or fill such "
            "rows before transform"
        )
    return values.reshape(rows, *spec.shape)


def _refuse_nulls(array: pa.Array, spec: ColumnSpec) -> None:
    if array.null_count:
        raise DataError(
            f"feature column {spec.name!r} has null; drop or fill such rows before transform"
        )


def output_type(output: Tensor) -> DataType:
    """The Spark type of a model's output: double for one value per row, else (nested) arrays.

    Args:
        output: shape (rows, ...).
    """
    from pyspark.sql import types

    floating = output.is_floating_point()
    if math.prod(output.shape[1:]) == 1:
        return types.DoubleType() if floating else types.LongType()
    data_type: DataType = types.FloatType() if floating else types.LongType()
    for _ in output.shape[1:]:
        data_type = types.ArrayType(data_type, containsNull=False)
    return data_type


def from_tensor(output: Tensor) -> pa.Array:
    """A model's output, shape (rows, ...), as an Arrow array of `output_type`."""
    import pyarrow as pa

    shape = output.shape
    single = math.prod(shape[1:]) == 1
    if output.is_floating_point():
        flat = output.to(torch.float64 if single else torch.float32).reshape(-1)
    else:
        flat = output.to(torch.int64).reshape(-1)
    array = pa.array(flat.contiguous().numpy())
    if single:
        return array
    for dimension in range(len(shape) - 1, 0, -1):
        lists = math.prod(shape[:dimension])
        offsets = torch.arange(lists + 1, dtype=torch.int32) * shape[dimension]
        array = pa.ListArray.from_arrays(pa.array(offsets.numpy()), array)
    return array


def vector_type() -> DataType:
    """The Spark type of what `from_vectors` gives."""
    from pyspark.ml.linalg import VectorUDT

    return VectorUDT()


def from_vectors(values: Tensor) -> pa.Array:
    """Numbers of shape (rows, entries) as Spark ML's dense vectors, in their form in Arrow."""
    import pyarrow as pa

    rows, entries = values.shape
    flat = pa.array(values.to(torch.float64).reshape(-1).contiguous().numpy())
    offsets = torch.arange(rows + 1, dtype=torch.int32) * entries
    fields = {
        "type": pa.array([1] * rows, pa.int8()),
        "size": pa.nulls(rows, pa.int32()),
        "indices": pa.nulls(rows, pa.list_(pa.int32())),
        "values": pa.ListArray.from_arrays(pa.array(offsets.numpy()), flat),
    }
    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
