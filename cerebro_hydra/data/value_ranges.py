"""Reads the smallest and largest values of columns from Parquet footers, without reading a row."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from pyarrow.parquet import FileMetaData

from cerebro_hydra.data.column_decoder import is_vector
from cerebro_hydra.data.manifest import Manifest, stored_name
from cerebro_hydra.data.parquet_files import metadata_of
from cerebro_hydra.data.prepared import footers
from cerebro_hydra.storage import Store

Range = tuple[float, float]


def value_ranges(manifest: Manifest, store: Store) -> dict[str, Range]:
    """Return the range of each column over all partitions.

    Columns of which a footer tells nothing are left out.

    Raises:
        DataError: a file can't be read.
    """
    data_path = store.data_path(manifest.fingerprint)
    if manifest.source is not None:
        own = {spec.name: spec.name for spec in manifest.columns}
        files = (os.path.join(data_path, file.path) for file in manifest.source.files)
        return footer_ranges(map(metadata_of, files), own)
    names = {stored_name(i): spec.name for i, spec in enumerate(manifest.columns)}
    folders = (f"{data_path}/{info.path}" for info in manifest.partitions)
    return footer_ranges((one for folder in folders for one in footers(store, folder)), names)


def footer_ranges(metadata: Iterable[FileMetaData], names: Mapping[str, str]) -> dict[str, Range]:
    """Return the range of each column over all files.

    Columns without statistics everywhere are left out, and so are Spark ML vectors.

    Args:
        metadata: the footers of the files.
        names: the name of a column in the answer, by its name in the files.
    """
    found: dict[str, Range] = {}
    untold: set[str] = set()
    for footer in metadata:
        chunks = _chunks(footer, names)
        for group in map(footer.row_group, range(footer.num_row_groups)):
            for number, name in chunks.items():
                statistics = group.column(number).statistics
                if not group.num_rows:
                    continue
                if statistics is None or not statistics.has_min_max:
                    untold.add(name)
                elif isinstance(statistics.min, int | float):
                    low, high = found.get(name, (statistics.min, statistics.max))
                    found[name] = (min(low, statistics.min), max(high, statistics.max))
    return {name: each for name, each in found.items() if name not in untold}


def _chunks(footer: FileMetaData, names: Mapping[str, str]) -> dict[int, str]:
    """Return which of a row group's chunks hold numbers of which column.

    A list's chunk is called "x.list.element", and a column may have the name "x.y".
    """
    fields = {field.name: field.type for field in footer.schema.to_arrow_schema()}
    found = {}
    for number in range(footer.num_columns):
        parts = footer.schema.column(number).path.split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        owner = next((prefix for prefix in prefixes if prefix in fields), "")
        # A vector's chunks hold its kind, size and places too, and leave zeros out.
        if owner in names and not is_vector(fields[owner]):
            found[number] = names[owner]
    return found
