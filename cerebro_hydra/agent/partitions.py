"""Decodes the partitions that are an agent's own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cerebro_hydra.data.cache import CachedPartition
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.storage import Store

Partitions = dict[int, CachedPartition]


def decode_partitions(
    manifest: Manifest,
    store: Store,
    scratch: str,
    stopping: threading.Event | None,
    own: Sequence[int],
) -> dict[str, Partitions]:
    """Return partitions by split and number; those that come after ``stopping`` are left out.

    Raises:
        DataError: the rows read differ from those that were prepared.
    """
    splits: dict[str, Partitions] = {"train": {}, "val": {}}
    for info in manifest.partitions:
        if info.index in own and not (stopping is not None and stopping.is_set()):
            cached = CachedPartition.build(info, manifest, store, scratch)
            splits[info.split][info.index] = cached
    return splits
