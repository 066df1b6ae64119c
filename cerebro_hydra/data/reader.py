"""Reading the Parquet files of one partition with petastorm, in one order, every row."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.errors import DataError

# petastorm calls what pyarrow 14 still has and later versions dropped; nobody can act on that here.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"petastorm\.")

# A schema in these files would be unpickled by petastorm, and ours have none.
_PICKLED = ("_common_metadata", "_metadata")


def read_columns(path: str, columns: Sequence[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the rows of a folder in stored order, one row group after another.

    Each item has for every column an array of shape (rows of the group,), or (rows, length) for
    a column of lists.

    Raises:
        DataError: the folder can't be read, lacks a column, or has lists of different lengths.
    """
    from petastorm import make_batch_reader

    for name in _PICKLED:
        if os.path.exists(os.path.join(path, name)):
            raise DataError(
                f"{path!r} holds {name!r}, which petastorm would unpickle; prepared data has none: "
                "delete the data and prepare it again"
            )
    try:
        # "dummy" reads in this thread: reader threads never give one order.
        with make_batch_reader(
            f"file://{path}",
            schema_fields=[f"^{re.escape(name)}$" for name in columns],
            reader_pool_type="dummy",
            shuffle_row_groups=False,
            num_epochs=1,
        ) as reader:
            for group in reader:
                yield {name: np.asarray(getattr(group, name)) for name in columns}
    except (GeneratorExit, DataError):
        raise
    except Exception as error:
        # Whatever petastorm or pyarrow raises here means the same to the user.
        raise DataError(
            f"petastorm can't read {list(columns)} from {path!r} ({type(error).__name__}: {error})"
            ": prepare the data again"
        ) from error
