"""Opens a run's documents and its prepared data again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cerebro_hydra.data.batches import Batch, batches, row_order, windows
from cerebro_hydra.data.cache import CachedPartition
from cerebro_hydra.data.prepared import read_manifest
from cerebro_hydra.errors import ReplayError, StoreError
from cerebro_hydra.recipe import Columns
from cerebro_hydra.storage.names import checked_trial_id, trial_name
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder, read_document


@dataclass
class RunData:
    """The documents and the decoded partitions that a replay reads."""

    folder: RunFolder
    document: RunDocument
    training: dict[int, CachedPartition]
    validation: dict[int, CachedPartition]

    @classmethod
    def open(cls, run_path: str, scratch: str) -> RunData:
        """Read a run, decoding its partitions into `scratch`."""
        folder = RunFolder.open(run_path)
        document = read_document(folder)
        manifest = read_manifest(folder.store, document.fingerprint)
        if manifest is None:
            raise StoreError(
                f"the data {document.fingerprint} of run {folder.path!r} is gone from its store; "
                "restore it from a copy"
            )
        parts: dict[str, dict[int, CachedPartition]] = {"train": {}, "val": {}}
        for info in sorted(manifest.partitions, key=lambda info: info.index):
            cached = CachedPartition.build(info, manifest, folder.store, scratch)
            parts[info.split][info.index] = cached
        return cls(folder, document, parts["train"], parts["val"])

    @property
    def seed(self) -> int:
        return self.document.seed

    def trial(self, trial_id: str) -> TrialSpec:
        """Return the trial of that name.

        Raises:
            ConfigurationError: it is not given by its name.
            ReplayError: the run has none, or it never started.
            StoreError: its document is damaged.
        """
        known = {trial_name(number): number for number in self.folder.trials()}
        if checked_trial_id(trial_id) not in known:
            raise ReplayError(
                f"run {self.folder.path} trained no trial {trial_id!r}; it has {list(known)}"
            )
        return self.folder.read_trial(known[trial_id], self.document.run_id)

    def windows(self, spec: TrialSpec, epoch: int, partition: int) -> Iterator[list[Batch]]:
        """Yield the batches of a sub-epoch in its seeded order, a window per optimizer step."""
        part = self.training[partition]
        order = row_order(part.rows, self.seed, epoch, partition)
        stream = self._batches(part, spec.batch_size, order)
        return windows(stream, spec.accumulate)

    def validation_batches(self, spec: TrialSpec, partition: int) -> Iterator[Batch]:
        """Yield the validation rows of a partition in stored order."""
        return self._batches(self.validation[partition], spec.batch_size, None)

    def _batches(
        self, part: CachedPartition, batch_size: int, order: NDArray[np.int64] | None
    ) -> Iterator[Batch]:
        columns = Columns.of(self.document)
        return batches(part, columns.features, columns.targets, batch_size, order)


@contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """Compute with as many threads as the run did: another number gives other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
