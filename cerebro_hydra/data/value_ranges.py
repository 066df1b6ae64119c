"""Smallest and largest value of columns, as Parquet footers tell without reading a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyarrow.parquet import FileMetaData

from cerebro_hydra.data.manifest import Manifest, stored_name
from cerebro_hydra.data.parquet_files import metadata_of
from cerebro_hydra.data.prepared import footers
from cerebro_hydra.storage import Store

Range = tuple[float, float]


def value_ranges(manifest: Manifest, store: Store) -> dict[str, Range]:
    """The range of each column over all partitions; columns that no footer tells of are left out.

    Raises:
        DataError: a file can't be read.
    """
    data_path = store.data_path(manifest.fingerprint)
    if manifest.source is not None:
        own = {spec.name: spec.name for spec in manifest.columns}
        files = (f"{data_path}/{file.path}" for file in manifest.source.files)
        return footer_ranges(map(metadata_of, files), own)
    names = {stored_name(i): spec.name for i, spec in enumerate(manifest.columns)}
    folders = (f"{data_path}/{info.path}" for info in manifest.partitions)
    return footer_ranges((one for folder in folders for one in footers(store, folder)), names)


def footer_ranges(each: Iterable[FileMetaData], names: Mapping[str, str]) -> dict[str, Range]:
    """The range of each column over all files; columns without statistics everywhere are left out.

    Args:
        names: what to call a column in the answer, by its name in the files.
    """
    found: dict[str, Range] = {}
    untold: set[str] = set()
    for footer in each:
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
