"""Makes the columns of a transform from a model's predictions, by way of Arrow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from cerebro_hydra.data.given_rows import misfit
from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.data.spec import column_problem
from cerebro_hydra.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


class Outputs(Protocol):
    """Makes columns of predictions; it travels in the query's closure."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        ...

    def types(self, sample: Sequence[Tensor]) -> list[DataType]:
        """Return the types of the columns, for predictions of the form of `sample`.

        Raises:
            ConfigurationError: the columns can't be made of them.
        """
        ...

    def arrays(self, predictions: Sequence[Tensor]) -> list[pa.Array]:
        """Return the columns of one batch; predictions are on the CPU, rows first."""
        ...


@dataclass(frozen=True)
class RawOutputs:
    """Makes columns of the first predictions as the network gives them: logits stay logits.

    One value per row becomes a double, more become an array, nested as the output is.
    """

    names: tuple[str, ...]

    def types(self, sample: Sequence[Tensor]) -> list[DataType]:
        """Return one type per column."""
        return [output_type(tensor) for tensor in self._counted(sample)]

    def arrays(self, predictions: Sequence[Tensor]) -> list[pa.Array]:
        """Return one column per name."""
        return [from_tensor(tensor) for tensor in self._counted(predictions)]

    def _counted(self, predictions: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(predictions) < len(self.names):
            raise ConfigurationError(
                f"forward gives {len(predictions)} tensors and there are {len(self.names)} output "
                "columns; name as many with set_output_columns([...]), or fewer"
            )
        return predictions[: len(self.names)]


def feature(df: DataFrame, spec: ColumnSpec) -> Column:
    """Convert a feature column to the dtype that its model was trained with.

    Vectors, dense or sparse, and floats become float32, integers int64 or float32.

    Raises:
        DataError: the column is missing or there twice, or its type can't become that without loss.
    """
    from cerebro_hydra.data.preparation.frame_columns import as_numbers, number_type

    problem = column_problem(df, spec.name, "feature column")
    if problem:
        raise DataError(problem)
    kind = df.schema[spec.name].dataType
    dtype, depth = number_type(kind)
    widened = (dtype, spec.dtype) == ("int64", "float32")
    if depth != len(spec.shape) or not (dtype == spec.dtype or widened):
        raise misfit(spec, kind.simpleString())
    return as_numbers(df, spec.name, spec.dtype)


def output_type(output: Tensor) -> DataType:
    """Return the Spark type of a model's output: double for one value per row, else nested arrays.

    Args:
        output: predictions of shape (rows, ...).

    Raises:
        ConfigurationError: the numbers are complex, which Spark has no type for.
    """
    from pyspark.sql import types

    if output.is_complex():
        raise ConfigurationError(
            "forward gives complex numbers, for which Spark has no type; let it give "
            "torch.view_as_real of them, or take predict(rows)"
        )
    of_dtype = {
        torch.int64: types.LongType(), torch.float32: types.FloatType(),
        torch.float64: types.DoubleType(),
    }  # fmt: skip
    data_type: DataType = of_dtype[_stored(output)]
    for _ in () if math.prod(output.shape[1:]) == 1 else output.shape[1:]:
        data_type = types.ArrayType(data_type, containsNull=False)
    return data_type


def from_tensor(output: Tensor) -> pa.Array:
    """Return a model's output of shape (rows, ...) as an Arrow array of `output_type`."""
    array = _flat(output, _stored(output))
    if math.prod(output.shape[1:]) != 1:
        for dimension in range(output.dim() - 1, 0, -1):
            array = _lists(array, output.shape[: dimension + 1])
    return array


def _stored(output: Tensor) -> torch.dtype:
    """Return the type of the numbers in a column, which holds each that the model gives."""
    if not output.is_floating_point():
        return torch.int64
    single = math.prod(output.shape[1:]) == 1
    return torch.float64 if single or output.dtype == torch.float64 else torch.float32


def vector_type() -> DataType:
    """Return the Spark type of `from_vectors`."""
    from pyspark.ml.linalg import VectorUDT

    return VectorUDT()


def from_vectors(values: Tensor) -> pa.Array:
    """Return numbers of shape (rows, entries) as Spark ML's dense vectors in Arrow."""
    import pyarrow as pa

    rows = len(values)
    fields = {
        "type": pa.array([1] * rows, pa.int8()),
        "size": pa.nulls(rows, pa.int32()),
        "indices": pa.nulls(rows, pa.list_(pa.int32())),
        "values": _lists(_flat(values, torch.float64), values.shape),
    }
    return pa.StructArray.from_arrays(list(fields.values()), names=list(fields))


def _flat(values: Tensor, dtype: torch.dtype) -> pa.Array:
    import pyarrow as pa

    return pa.array(values.to(dtype).reshape(-1).contiguous().numpy())


def _lists(values: pa.Array, shape: Sequence[int]) -> pa.Array:
    """Group values into lists as long as the last dimension of the shape that they all have."""
    import pyarrow as pa

    offsets = torch.arange(math.prod(shape[:-1]) + 1, dtype=torch.int32) * shape[-1]
    return pa.ListArray.from_arrays(pa.array(offsets.numpy()), values)
