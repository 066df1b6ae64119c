"""Verifies stored partitions against their manifest, without training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.partition_rows import checked_rows, local_partition
from cerebro_hydra.errors import DataError, StoreError
from cerebro_hydra.storage import Store


@dataclass(frozen=True)
class PartitionCheck:
    """Says whether a partition's rows are those of the manifest."""

    split: str
    """"train" or "val"."""
    index: int
    rows: int
    """The rows that the manifest promises."""
    problem: str | None
    """What is wrong and what to do; names partition, column and file as far as known. None if
    every row is as it was written."""


def check_partitions(manifest: Manifest, store: Store, scratch: str) -> Iterator[PartitionCheck]:
    """Read every partition as an agent does, and yield one result for each, in manifest order.

    Counts, row ids, types and contents are compared with the manifest. Nothing raises because of
    damaged data: each result says what is wrong, and the partitions after it are read all the same.

    Args:
        manifest: the data, prepared or existing files.
        store: has it.
        scratch: an existing folder, which is used only for passing copies of remote files.
    """
    for info in manifest.partitions:
        problem = None
        try:
            with local_partition(info, manifest, store, scratch) as data_path:
                for _ in checked_rows(info, manifest, data_path):
                    pass
        except (DataError, StoreError) as error:
            problem = str(error)
        yield PartitionCheck(info.split, info.index, info.rows, problem)
