"""Turns rows that a user has at hand into tensors: a table, a dict, dicts, an array, or Arrow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from cerebro_hydra.data.cells import CELLS, IMAGE_FIELDS, IMAGE_TYPE, CellPool
from cerebro_hydra.data.decoder import (
    UNFIT,
    convert,
    decode,
    decoded_type,
    dtype_from_numpy,
    faulty,
    misshapen,
)
from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.data.tables import arrow_table, is_table
from cerebro_hydra.errors import DataError, kind_of
from cerebro_hydra.recipe.batch.cells import Cells


def feature_tensors(rows: Any, specs: Sequence[ColumnSpec]) -> tuple[Tensor, ...]:
    """Return a tensor of shape (rows, *shape of a row) per feature column; none shares memory.

    Args:
        rows: a table of pandas or polars; a mapping of columns; a list of mappings, one per row; or
            the array or tensor of the only feature column. Other columns are left out.
        specs: what the model was trained with, in the order in which it takes them.

    Raises:
        DataError: a column is missing, or has another type or shape, or there are no rows.
    """
    if is_table(rows):
        tensors = table_tensors(rows, specs)
    else:
        columns = _columns(rows, [spec.name for spec in specs])
        tensors = tuple(_tensor(column, spec) for column, spec in zip(columns, specs, strict=True))
    counts = {spec.name: len(tensor) for spec, tensor in zip(specs, tensors, strict=True)}
    if len(set(counts.values())) > 1:
        raise DataError(f"columns have different numbers of rows: {counts}; give as many of each")
    if not len(tensors[0]):
        raise DataError("there are no rows; give at least one")
    return tensors


def table_tensors(table: Any, specs: Sequence[ColumnSpec]) -> tuple[Tensor, ...]:
    """Return a tensor per feature column of a table of pandas or polars, which may have no rows.

    Raises:
        DataError: as `feature_tensors`.
    """
    given = arrow_table(table, [spec.name for spec in specs])
    for spec in specs if given.num_rows else ():  # without rows, no type is known
        _check_kind(given[spec.name].type, spec)
    return tuple(to_tensor(given[spec.name], spec, "row {}".format) for spec in specs)


def to_tensor(array: pa.Array, spec: ColumnSpec, where: Callable[[int], str]) -> Tensor:
    """Copy an Arrow column to a tensor of shape (rows, *spec.shape).

    Args:
        array: the column.
        spec: what its model was trained with.
        where: says in messages where the row at a position of the array lies.

    Raises:
        DataError: a value is null, NaN or infinite, or a row has another shape.
    """
    values = decode(array, spec.dtype).array(spec.name, where, spec.shape)
    if spec.dtype in CELLS:
        pool = CellPool.of(values, spec.name, where, spec.dtype == "image")
        return Cells.of(range(len(pool)), pool)
    return torch.from_numpy(values.copy())


def _check_kind(kind: pa.DataType, spec: ColumnSpec) -> None:
    """Refuse a feature column of Arrow that its model was not trained with.

    Raises:
        DataError: its type can't become that of the training rows without loss.
    """
    if spec.dtype in CELLS and decoded_type(kind) == spec.dtype:
        return
    told, depth = kind, 0
    while pa.types.is_list(kind):
        kind, depth = kind.value_type, depth + 1
    families = {
        "bool": pa.types.is_boolean,
        "int64": pa.types.is_integer,
        "float32": lambda t: pa.types.is_floating(t) or pa.types.is_decimal(t),
    }
    dtype = next((name for name, family in families.items() if family(kind)), None)
    widened = (dtype, spec.dtype) == ("int64", "float32")
    if depth != len(spec.shape) or not (dtype == spec.dtype or widened):
        raise misfit(spec, str(told))


def misfit(spec: ColumnSpec, kind: str) -> DataError:
    """Report a feature column of another type than its model was trained with."""
    return DataError(
        f"feature column {spec.name!r} is {kind}, and the model was trained with {spec.dtype} of "
        f"shape {spec.shape} per row; cast it to that"
    )


def _columns(rows: Any, names: list[str]) -> list[Any]:
    if isinstance(rows, np.ndarray | Tensor):
        if len(names) > 1:
            raise DataError(
                f"rows is one array of shape {tuple(rows.shape)}, and the model takes the columns "
                f"{names}; give a dict or a pandas DataFrame with them"
            )
        return [rows]
    if isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows):
        for number, row in enumerate(rows):
            _check_names(row, names, f"row {number}")
        return [[row[name] for row in rows] for name in names]
    if hasattr(rows, "sparkSession"):
        raise DataError("rows is a DataFrame of Spark; use transform(df) for it")
    if not isinstance(rows, Mapping):
        raise DataError(
            f"rows is {kind_of(rows)}; give a pandas DataFrame, a dict of arrays or a list "
            f"of dicts with the columns {names}"
        )
    _check_names(rows, names, "the data")
    return [rows[name] for name in names]


def _check_names(given: Mapping[str, Any] | Sequence[str], names: list[str], what: str) -> None:
    missing = [name for name in names if name not in given]
    if missing:
        raise DataError(
            f"{what} has no column {missing[0]!r}; the model takes {names}, and there are "
            f"{list(given)}"
        )


def _tensor(column: Any, spec: ColumnSpec) -> Tensor:
    if spec.dtype in CELLS:
        return _cells(column, spec)
    values = _numbers(column, spec.name)
    found = dtype_from_numpy(values.dtype)
    if found != spec.dtype and (found, spec.dtype) != ("int64", "float32"):
        raise DataError(
            f"column {spec.name!r} holds {values.dtype}, and the model was trained with "
            f"{spec.dtype} of shape {spec.shape} per row; cast it to that"
        )
    if values.ndim == 0 or values.shape[1:] != spec.shape:
        raise misshapen(spec.name, values.shape[1:], spec.shape)
    flat, unfit = convert(values.reshape(-1), spec.dtype)
    if len(unfit):
        row = int(unfit[0]) // max(math.prod(spec.shape), 1)
        raise faulty(spec.name, UNFIT[spec.dtype], f"row {row}")
    return torch.from_numpy(np.array(flat, copy=True).reshape(values.shape))


def _cells(column: Any, spec: ColumnSpec) -> Tensor:
    rows = [row.asDict() if hasattr(row, "asDict") else row for row in column]
    try:
        array = pa.array(rows, pa.binary() if spec.dtype == "binary" else IMAGE_TYPE)
    except (pa.ArrowException, TypeError, ValueError) as error:
        remedy = "bytes" if spec.dtype == "binary" else f"dicts of {list(IMAGE_FIELDS)}"
        raise DataError(
            f"column {spec.name!r} holds other rows than the {spec.dtype} ones that the model was "
            f"trained with ({error}); give {remedy}"
        ) from error
    return to_tensor(array, spec, "row {}".format)


def _numbers(column: Any, name: str) -> NDArray[Any]:
    """Return a column as one array; cells may be arrays, lists, tensors or vectors of Spark ML."""
    if isinstance(column, Tensor):
        column = column.detach().cpu()
        return (column.float() if column.dtype == torch.bfloat16 else column).numpy()
    values = np.asarray(column) if hasattr(column, "dtype") else None
    if values is None or values.dtype == object:
        cells = [
            cell.toArray() if hasattr(cell, "toArray") else np.asarray(cell) for cell in column
        ]
        shapes = {cell.shape for cell in cells}
        if len(shapes) > 1:
            raise DataError(
                f"rows of column {name!r} have the shapes {sorted(shapes)}; give all rows one shape"
            )
        values = np.stack(cells) if cells else np.empty(0, np.float32)
    return values
