"""Smallest and largest value of columns, as Parquet footers tell without reading a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import BinaryIO

import pyarrow.parquet as pq

Range = tuple[float, float]


def value_ranges(files: Iterable[BinaryIO], names: Mapping[str, str]) -> dict[str, Range]:
    """The range of each column over all files; columns without statistics everywhere are left out.

    Args:
        names: what to call a column in the answer, by its name in the files.
    """
    found: dict[str, Range] = {}
    untold: set[str] = set()
    for file in files:
        with file:
            footer = pq.read_metadata(file)
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                name = names.get(chunk.path_in_schema.split(".")[0])
                if name is None or not group.num_rows:
                    continue
                statistics = chunk.statistics
                if statistics is None or not statistics.has_min_max:
                    untold.add(name)
                elif isinstance(statistics.min, int | float):
                    low, high = found.get(name, (statistics.min, statistics.max))
                    found[name] = (min(low, statistics.min), max(high, statistics.max))
    return {name: each for name, each in found.items() if name not in untold}
