"""Reads the schema of codecs beside a petastorm row store's files, and decodes their cells.

The schema is a pickle. It is read once, from the path that the user named, and kept as plain data
from then on; decoding cells needs no pickle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cerebro_hydra.data import decoder as column_decoder
from cerebro_hydra.data import decoder as faults
from cerebro_hydra.data.decoder import DecodedColumn, ListLengths, dtype_from_numpy
from cerebro_hydra.data.manifest import Codec
from cerebro_hydra.data.spec import missing_column
from cerebro_hydra.errors import DataError, SetupError

SCHEMA_FILE = "_common_metadata"
_SCHEMA_KEY = b"dataset-toolkit.unischema.v1"  # petastorm's, to be known where it is absent too
_KINDS = {
    "ScalarCodec": "scalar",
    "NdarrayCodec": "ndarray",
    "CompressedNdarrayCodec": "compressed_ndarray",
    "CompressedImageCodec": "image",
}


def is_row_store(root: str) -> bool:
    """Say whether petastorm wrote a schema of codecs beside the files."""
    path = os.path.join(root, SCHEMA_FILE)
    if not os.path.isfile(path):
        return False
    try:
        return _SCHEMA_KEY in (pq.read_schema(path).metadata or {})
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path!r} is not a whole Parquet file ({error}): write the data again"
        ) from error


def read_codecs(root: str, columns: Sequence[str]) -> list[tuple[str | None, Codec | None]]:
    """Return dtype and codec of columns of a row store; its schema is unpickled.

    Both are None where Parquet's own types say what a column holds.

    Raises:
        SetupError: petastorm is not here.
        DataError: the schema can't be read, lacks a column, or has one that is not numbers.
    """
    fields = _fields(root)
    found: list[tuple[str | None, Codec | None]] = []
    for name in columns:
        if name not in fields:
            raise DataError(missing_column("column", name, repr(root), list(fields)))
        field = fields[name]
        if field.numpy_dtype is Decimal or (field.codec is None and field.shape):
            found.append((None, None))
            continue
        kind = "scalar" if field.codec is None else _KINDS.get(type(field.codec).__name__)
        if kind is None:
            raise DataError(
                f"column {name!r} is kept by petastorm's {type(field.codec).__name__}; only "
                f"{sorted(_KINDS)} can be read: write it again with one of these"
            )
        there = np.dtype(field.numpy_dtype)
        dtype = dtype_from_numpy(there)
        if dtype is None:
            shown = f"{there.name} in petastorm's schema"
            raise faults.unusable(name, shown, there.kind in "US")
        found.append((dtype, Codec(kind, there.name)))
    return found


def _fields(root: str) -> dict[str, Any]:
    with _petastorm_for(f"the petastorm row store {root!r}"):
        from petastorm.etl.dataset_metadata import get_schema
    path = os.path.join(root, SCHEMA_FILE)
    try:
        schema = get_schema(SimpleNamespace(common_metadata=pq.read_metadata(path)))
        return dict(schema.fields)
    except Exception as error:
        # Whatever unpickling raises means the same to the user.
        raise DataError(
            f"petastorm can't read its schema in {path!r} ({type(error).__name__}: {error}): write "
            "the store again, or as plain Parquet"
        ) from error


def decode(array: pa.Array, codec: Codec | None, dtype: str) -> DecodedColumn:
    """Decode a column of existing files, each cell by petastorm's codec if it has one.

    Raises:
        SetupError: what the codec needs is not here.
    """
    if codec is None or codec.kind == "scalar":
        return column_decoder.decode(array, dtype, None if codec is None else codec.dtype)
    decoder = _decoder(codec.kind)
    undecodable = f"can't be decoded as petastorm's {codec.kind}"
    other = f"holds arrays of other dimensions than before, or not of {codec.dtype}"
    wrong: dict[str, list[int]] = {undecodable: [], other: [], faults.NULL: []}
    rows: list[int] = []
    values: list[NDArray[Any]] = []
    for row, cell in enumerate(array):
        if not cell.is_valid:
            wrong[faults.NULL].append(row)
            continue
        try:
            value = np.asarray(decoder(cell.as_py()))
        except Exception:
            wrong[undecodable].append(row)
            continue
        if dtype_from_numpy(value.dtype) != dtype or (values and value.ndim != values[0].ndim):
            wrong[other].append(row)
            continue
        rows.append(row)
        values.append(value)
    lengths = tuple(
        ListLengths(int(sizes.min()), int(sizes.max()), rows[int(sizes.argmin())])
        for sizes in np.array([value.shape for value in values], np.int64).T
    )
    flat = [value.ravel() for value in values]
    numbers, unfit = column_decoder.convert(
        np.concatenate(flat) if flat else np.empty(0, dtype), dtype
    )
    ends = np.cumsum([value.size for value in values], dtype=np.int64)
    unfit_rows = np.array(rows, np.int64)[np.searchsorted(ends, unfit, side="right")]
    found = {fault: np.array(each, np.int64) for fault, each in wrong.items() if each}
    found |= faults.rows_by_fault(dtype, np.empty(0, np.int64), unfit_rows)
    return DecodedColumn(len(array), numbers, lengths, found)


@contextmanager
def _petastorm_for(what: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise SetupError(
            f"{what} needs petastorm, which can't be imported here ({error}): install it with "
            "pyarrow 14 on the driver and every worker, or write the rows as plain Parquet"
        ) from error


def _decoder(kind: str) -> Callable[[bytes], NDArray[Any]]:
    with _petastorm_for("a petastorm row store"):
        from petastorm import codecs
    try:
        codec = getattr(codecs, next(name for name in _KINDS if _KINDS[name] == kind))()
    except AssertionError as error:
        raise SetupError(
            "petastorm's CompressedImageCodec needs OpenCV: install opencv-python-headless on every"
            " worker"
        ) from error
    # None of these looks at the field that petastorm hands over.
    return lambda cell: codec.decode(None, cell)  # type: ignore[no-any-return]
