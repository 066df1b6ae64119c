"""Reads every row of a folder of Parquet files with petastorm, in one order."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cerebro_hydra.data.parquet import ArrowReader, ParquetFolder, element_of
from cerebro_hydra.errors import DataError

NEWEST_PYARROW = 14
"""The last major version that petastorm works with."""

# petastorm calls what pyarrow 14 still has and later versions dropped; nobody can act on that here.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"petastorm\.")


@cache
def obstacle() -> str | None:
    """Say why this process can't use petastorm; None if it can."""
    try:
        version = importlib.metadata.version("petastorm")
    except importlib.metadata.PackageNotFoundError:
        return "petastorm is not installed"
    if int(pa.__version__.split(".")[0]) > NEWEST_PYARROW:
        return f"petastorm {version} fails with pyarrow {pa.__version__}"
    try:
        import petastorm.reader  # noqa: F401
    except Exception as error:
        # It is unmaintained: beside packages that it never saw, its import may raise anything.
        return f"petastorm {version} can't be imported ({type(error).__name__}: {error})"
    return None


class PetastormReader:
    """Reads one row group after another, with petastorm's reader that works in this thread."""

    def __init__(self) -> None:
        """Name the version of petastorm, which must be here: see `obstacle`."""
        self.name = f"petastorm {importlib.metadata.version('petastorm')}"

    def groups(
        self, folder: ParquetFolder, columns: Sequence[str]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the arrays of each row group; see `data.reader.Reader`."""
        if not folder.files:
            return
        kinds = dict(zip(columns, folder.kinds, strict=True))
        checked = set()
        try:
            for group in _batches(folder, columns):
                for name, kind in kinds.items():
                    null_free = name in folder.null_free
                    if name not in checked and _is_suspect(group[name], kind, null_free):
                        _refuse_unsound(folder, name)
                        checked.add(name)
                yield group
        except DataError:
            raise
        except Exception:
            # Arrow says which row is at fault; where it finds none, the fault is petastorm's own.
            for name in columns:
                _refuse_unsound(folder, name)
            raise


def _batches(folder: ParquetFolder, columns: Sequence[str]) -> Iterator[dict[str, NDArray[Any]]]:
    from petastorm import make_batch_reader

    # "dummy" reads in this thread: reader threads never give one order.
    with make_batch_reader(
        [f"file://{file}" for file in folder.files],
        schema_fields=[f"^{re.escape(name)}$" for name in columns],
        reader_pool_type="dummy",
        shuffle_row_groups=False,
        num_epochs=1,
    ) as reader:
        left = folder.rows
        for group in reader:
            arrays = {name: np.asarray(getattr(group, name)) for name in columns}
            yield arrays
            left -= len(arrays[columns[0]])
            if left <= 0:
                # Asked for more, it waits for ever if its other thread, which has handed out the
                # last row group, has yet to note that this was the last one.
                break


def _is_suspect(values: NDArray[Any], kind: pa.DataType, null_free: bool) -> bool:
    """Say whether values may hold null: petastorm makes NaN of it, or changes their dtype."""
    if values.dtype != element_of(kind).to_pandas_dtype():
        return True
    if null_free or values.dtype.kind not in "fO":
        return False
    if values.dtype == object:
        return any(value is None for value in values)
    with np.errstate(invalid="ignore", over="ignore"):
        return bool(np.isnan(values.sum()))


def _refuse_unsound(folder: ParquetFolder, name: str) -> None:
    """Read a column with Arrow, which names the row at fault.

    Raises:
        DataError: a row is null, holds null, or has another length than others.
    """
    for _ in ArrowReader().groups(folder, [name]):
        pass
