"""Stores of Parquet files, written as others write them: plain, and by petastorm."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation import existing
from cerebro_hydra.data.spec import DataSpec
from cerebro_hydra.storage import Store

if TYPE_CHECKING:
    from petastorm.unischema import Unischema

CEREBRO_STORE = Path(__file__).with_name("cerebro_store")
"""Written by `util.prepare_data` of cerebro-dl 1.1.1: 54 training and 6 validation rows."""

UNEVEN = ((7, 1, 30), (), (2,), (11, 9))
"""Rows of the row groups of four files, one of which has none."""


def write_plain(
    root: Path, table: pa.Table, groups: Sequence[Sequence[int]] = UNEVEN, start: int = 0
) -> Path:
    """Write a table as files with these row groups, which sum to its rows."""
    root.mkdir(parents=True, exist_ok=True)
    for number, sizes in enumerate(groups):
        with pq.ParquetWriter(root / f"part-{number:05d}.parquet", table.schema) as writer:
            for size in sizes:
                writer.write_table(table.slice(start, size), row_group_size=max(1, size))
                start += size
    (root / "_SUCCESS").touch()
    (root / ".part-00000.parquet.crc").write_bytes(b"crc")
    assert start == table.num_rows
    return root


def write_row_store(
    root: Path,
    schema: Unischema,
    rows: Sequence[Mapping[str, Any]],
    types: Mapping[str, pa.DataType],
    groups: Sequence[Sequence[int]] = UNEVEN,
) -> Path:
    """Write rows as petastorm's `materialize_dataset` does, with Arrow in Spark's place."""
    from petastorm import utils
    from petastorm.etl import dataset_metadata
    from petastorm.unischema import dict_to_spark_row

    encoded = [dict_to_spark_row(schema, dict(row)).asDict() for row in rows]
    cells = {
        name: pa.array([_cell(row[name]) for row in encoded], kind) for name, kind in types.items()
    }
    write_plain(root, pa.table(cells), groups)
    counts = {path.name: pq.read_metadata(path).num_row_groups for path in root.glob("*.parquet")}
    key = dataset_metadata.ROW_GROUPS_PER_FILE_KEY
    with warnings.catch_warnings():
        # petastorm takes nothing newer.
        warnings.simplefilter("ignore", FutureWarning)
        dataset = pq.ParquetDataset(str(root), use_legacy_dataset=True, validate_schema=False)
        dataset_metadata._generate_unischema_metadata(dataset, schema)
        utils.add_to_dataset_metadata(dataset, key, json.dumps(counts))
    return root


def _cell(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray) else value


def describe(
    store: Store,
    columns: Sequence[str],
    partitions: int,
    validation: float | str | None,
    seed: int = 0,
    mapper: Any = map,
) -> Manifest:
    """Make a store's existing files its data, with all columns as features."""
    spec = DataSpec.checked(columns, validation=validation, seed=seed)
    return existing.describe(store, partitions, spec, mapper)


def read_all(store: Store, manifest: Manifest, split: str, cache: Path) -> list[CachedPartition]:
    """Every partition of a split as agents have it."""
    return [
        CachedPartition.build(info, manifest, store, str(cache))
        for info in manifest.partitions
        if info.split == split
    ]


def joined(parts: Sequence[CachedPartition], column: str) -> NDArray[Any]:
    """One column of all partitions, in their order."""
    return np.concatenate([part.columns[column] for part in parts])
