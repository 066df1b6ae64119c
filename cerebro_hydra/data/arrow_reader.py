"""Reads a folder of Parquet files with Arrow alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cerebro_hydra.data.column_decoder import decode
from cerebro_hydra.data.faults import row_of_file
from cerebro_hydra.data.parquet_folder import ParquetFolder


class ArrowReader:
    """Reads one row group after another, into arrays that share Arrow's memory where they can."""

    name = f"Arrow {pa.__version__}"

    def groups(
        self, folder: ParquetFolder, columns: Sequence[str]
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the arrays of each row group; see `data.reader.Reader`."""
        for file in folder.files:
            with pq.ParquetFile(file) as parquet:
                first = 0
                for number in range(parquet.num_row_groups):
                    table = parquet.read_row_group(number, columns=list(columns))
                    where = partial(row_of_file, file, first)
                    yield {name: decode(table[name]).array(name, where) for name in columns}
                    first += table.num_rows
