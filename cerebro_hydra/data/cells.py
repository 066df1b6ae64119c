"""Describes values that are bytes of any length: rows of binary columns, and of Spark's images.

```
a cell of "binary"   its bytes, as they were given
a cell of "image"    height, width, channels as three big-endian 32-bit numbers | pixels, as Spark
                     has them: rows from top to bottom, of a pixel blue, green, red(, alpha)
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import types

CELLS = ("binary", "image")
"""The dtypes of columns whose rows are bytes."""

IMAGE_MODES = {0: 1, 16: 3, 24: 4}
"""The channels of each mode of Spark's images that has 8 bits: OpenCV's numbers of its types."""

IMAGE_TYPE = pa.struct(
    [
        ("origin", pa.string()),
        *((name, pa.int32()) for name in ("height", "width", "nChannels", "mode")),
        ("data", pa.binary()),
    ]
)
"""Spark's images in Arrow."""

IMAGE_FIELDS = tuple(field.name for field in IMAGE_TYPE)
UNFIT_IMAGE = (
    "holds an image that can't be used: of another mode than CV_8UC1, CV_8UC3 and CV_8UC4, or of "
    "fewer bytes than its size says"
)


@dataclass(frozen=True)
class CellPool:
    """Holds the cells of consecutive rows; position i is row i."""

    data: NDArray[np.uint8]
    """The bytes of all rows, one after another; it may be a memory map."""
    ends: NDArray[np.int64]
    """Where each row ends in `data`; shape (rows,)."""
    column: str
    """The column's name."""
    where: Callable[[int], str]
    """Says in messages where the row at a position lies."""
    image: bool = False
    """Whether cells are Spark's images."""
    key: str | None = None
    """A name that other rows never have, so that what is made of a row can be kept; or None."""

    @classmethod
    def of(
        cls,
        values: Sequence[bytes] | NDArray[Any],
        column: str,
        where: Callable[[int], str],
        image: bool = False,
    ) -> CellPool:
        """Make a pool of one bytes object per row."""
        ends = np.cumsum([len(value) for value in values], dtype=np.int64)
        return cls(np.frombuffer(b"".join(values), np.uint8), ends, column, where, image)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ends)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows."""
        return self.data.nbytes + self.ends.nbytes

    def bounds(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where rows begin and end in `data`."""
        starts = np.where(rows > 0, self.ends[rows - 1], 0)
        return starts, self.ends[rows]

    def cell(self, row: int) -> bytes:
        """Return the bytes of a row."""
        start = int(self.ends[row - 1]) if row else 0
        return self.data[start : int(self.ends[row])].tobytes()


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype of a column in memory; cells are bytes objects."""
    return np.dtype(object if dtype in CELLS else dtype)


def is_binary(kind: pa.DataType) -> bool:
    """Say whether values of an Arrow type are bytes."""
    return bool(
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    )


def is_image(kind: pa.DataType) -> bool:
    """Say whether values are Spark's images, as Spark writes them to Parquet."""
    return types.is_struct(kind) and {field.name for field in kind} == {*IMAGE_FIELDS}


def cells_of_images(images: pa.StructArray) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the cells of Spark's images without null, and the rows that can't be used."""
    fields = dict(zip((field.name for field in images.type), images.flatten(), strict=True))
    numbers = [
        pc.fill_null(fields[name], -1).to_numpy(zero_copy_only=False).astype(np.int64)
        for name in ("height", "width", "nChannels", "mode")
    ]
    cells = np.empty(len(images), object)
    unfit = []
    pixels = fields["data"].to_numpy(zero_copy_only=False)
    for row, (height, width, channels, mode, data) in enumerate(zip(*numbers, pixels, strict=True)):
        usable = IMAGE_MODES.get(int(mode)) == channels and min(height, width) > 0
        if usable and data is not None and len(data) == height * width * channels:
            cells[row] = np.array([height, width, channels], ">u4").tobytes() + data
        else:
            cells[row] = b""
            unfit.append(row)
    return cells, np.array(unfit, np.int64)
