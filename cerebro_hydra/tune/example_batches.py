"""Makes example batches to admit models with, from the first rows of the data."""

from __future__ import annotations

import numpy as np

from cerebro_hydra.data.batches import Batch, batch_sizes, batches
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.partition import CachedPartition, RowBlock, read_rows
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns
from cerebro_hydra.storage import Store


class ExampleBatches:
    """Makes batches of every size that training over a manifest's partitions meets.

    The driver reads only as many rows as the largest batch has, and no partition as a whole.
    """

    def __init__(self, manifest: Manifest, store: Store, columns: Columns) -> None:
        """Read nothing yet.

        Raises:
            ConfigurationError: a training partition has no rows.
        """
        self.manifest = manifest
        self._store = store
        self._data_path = store.data_path(manifest.fingerprint)
        self._columns = columns
        self._head: CachedPartition | None = None
        self.partition_rows = [manifest.rows("train", i) for i in range(manifest.num_partitions)]
        if min(self.partition_rows, default=0) < 1:
            raise ConfigurationError(
                f"there are {sum(self.partition_rows)} training rows for {manifest.num_partitions} "
                "partitions; give more rows, fewer workers or a smaller share of validation rows"
            )

    def sizes(self, batch_size: int) -> list[int]:
        """Return every number of rows that a batch will have, the largest first."""
        met = {size for rows in self.partition_rows for size in batch_sizes(rows, batch_size)}
        return sorted(met, reverse=True)

    def batches(self, batch_size: int) -> list[Batch]:
        """Return one batch of real rows for each of `sizes`."""
        return [self._batch(size) for size in self.sizes(batch_size)]

    def _batch(self, size: int) -> Batch:
        return batch_of(self._first_rows(size), self._columns, size)

    def _first_rows(self, count: int) -> CachedPartition:
        info = self.manifest.partition("train", 0)
        count = min(count, info.rows)
        if self._head is None or self._head.rows < count:
            read: list[RowBlock] = []
            with self._store.local_copy(self._data_path, info.path) as data_path:
                for rows in read_rows(info, self.manifest, data_path):
                    read.append(rows)
                    if sum(map(len, read)) >= count:
                        break
            columns = {
                spec.name: np.concatenate([rows.columns[i] for rows in read])[:count]
                for i, spec in enumerate(self.manifest.columns)
            }
            self._head = CachedPartition(count, columns)
        return self._head


def batch_of(head: CachedPartition, columns: Columns, size: int) -> Batch:
    """Return a batch of so many rows, which begin anew where the head has fewer.

    Partition 0 may be a row shorter than the partition that has a batch of this size.
    """
    order = np.arange(size, dtype=np.int64) % head.rows
    (batch,) = batches(head, columns.features, columns.targets, size, order)
    return batch
