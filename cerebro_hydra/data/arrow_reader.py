"""Reading a folder of Parquet files with Arrow alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cerebro_hydra.data.arrow_arrays import to_numpy
from cerebro_hydra.data.parquet_folder import ParquetFolder


class ArrowReader:
    """Row group after row group, in numpy arrays that share Arrow's memory where they can."""

    name = f"Arrow {pa.__version__}"

    def groups(
        self, folder: ParquetFolder, columns: Sequence[str]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the arrays of each row group; see `data.reader.Reader`."""
        for file in folder.files:
            first_row = 0
            with pq.ParquetFile(file) as parquet:
                for group in range(parquet.num_row_groups):
                    table = parquet.read_row_group(group, columns=list(columns))
                    yield {
                        name: to_numpy(table[name], f"column {name!r} in {file!r}", first_row)
                        for name in columns
                    }
                    first_row += table.num_rows
