"""Reads from a run's journal where one trial went, and opens its documents and data again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cerebro_hydra.data.batches import Batch, batches, replica_windows, row_order
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.data.preparation.prepared import read_manifest
from cerebro_hydra.documents import Count, decode
from cerebro_hydra.errors import JournalError, ReplayError, StoreError
from cerebro_hydra.recipe import Columns
from cerebro_hydra.storage.names import checked_trial_id, trial_name
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec
from cerebro_hydra.storage.run_folder import RunFolder, read_document


@dataclass(frozen=True)
class PartitionBatch(Batch):
    """Holds the rows of a batch of one partition."""

    partition: int


@dataclass(frozen=True)
class SubEpochVisit:
    """Says which partitions a trial trained over in one visit, in rank order, and what it made."""

    state: int
    epoch: int
    partitions: tuple[int, ...]


@dataclass
class TrialRecord:
    """Holds a trial in the journal: visits that were not taken back, and the measured epochs.

    A fork begins with those of its parent.
    """

    ancestors: list[tuple[int, int]] = field(default_factory=list)
    """The trials that it goes on from, oldest first, each with the state at which it was forked."""
    visits: dict[int, tuple[int, int]] = field(default_factory=dict)
    """State → (epoch, partition). Of a visit to several partitions the last one made a state."""
    together: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """State → the partitions that the visit which made it trained over, in rank order."""
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Epoch → measured values."""
    status: str = "unfinished"
    result_state: int | None = None
    """The state that is the trial's result, 0 if it failed; None while it is unfinished."""

    @property
    def rests(self) -> bool:
        """Return whether its run has ended for now, and keeps its result so far."""
        return self.status == TrialRecord.status and self.result_state is not None

    def go_on(self) -> None:
        """Have no result so far any more, because the run was resumed."""
        if self.rests:
            self.result_state = None

    @property
    def visit_log(self) -> list[tuple[int, int]]:
        return [self.visits[state] for state in sorted(self.visits)]

    @property
    def sub_epochs(self) -> list[SubEpochVisit]:
        """Return the visits in their order."""
        return [
            SubEpochVisit(state, self.visits[state][0], self.together[state])
            for state in sorted(self.together)
        ]

    def problem(self, num_partitions: int) -> str | None:
        """Say how the log breaks the rule of one visit per epoch and partition, if it does."""
        seen: set[tuple[int, int]] = set()
        for epoch, partition in self.visit_log:
            if (epoch, partition) in seen:
                return f"partition {partition} was visited twice in epoch {epoch + 1}"
            if partition >= num_partitions:
                return f"partition {partition} was visited, and there are {num_partitions}"
            seen.add((epoch, partition))
        for number, (epoch, partition) in enumerate(self.visit_log):
            if epoch != number // num_partitions:
                return f"visit {number + 1} belongs to epoch {epoch + 1}, partition {partition}"
        return None

    def fork(self, number: int, parent: TrialRecord, state: int) -> None:
        """Begin with what trial `number` had done up to a state."""
        begun = 0
        for ancestor, until in [*parent.ancestors, (number, state)]:
            if begun < state:
                self.ancestors.append((ancestor, min(until, state)))
            begun = until
        self.visits = {v: where for v, where in parent.visits.items() if v <= state}
        self.together = {v: where for v, where in parent.together.items() if v <= state}
        open_epochs = {epoch for v, (epoch, _) in parent.visits.items() if v > state}
        self.metrics = {e: each for e, each in parent.metrics.items() if e not in open_epochs}


def read_trial(folder: RunFolder, trial: int) -> TrialRecord:
    """Read one trial's record from the journal.

    Raises:
        JournalError: the journal is damaged.
    """
    records = defaultdict[int, TrialRecord](TrialRecord)
    for line in folder.read_records():
        if _value(line, "event", dict[str, Any], {}).get("type") == "RunResumed":
            for record in records.values():
                record.go_on()
        for instruction in _value(line, "instructions", list[dict[str, Any]], []):
            if "trial" not in instruction:
                continue
            record = records[_value(instruction, "trial", Count)]
            if instruction.get("type") == "ForkState":
                parent, state = (_value(instruction, n, Count) for n in ("parent", "state"))
                record.fork(parent, records[parent], state)
            else:
                _apply(record, instruction)
    return records[trial]


def _apply(record: TrialRecord, instruction: dict[str, Any]) -> None:
    match instruction.get("type"):
        case "Commit":
            state, epoch = (_value(instruction, name, Count) for name in ("state", "epoch"))
            partitions = _value(instruction, "partitions", tuple[Count, ...])
            first = state - len(partitions) + 1
            record.visits |= {first + n: (epoch, p) for n, p in enumerate(partitions)}
            record.together[state] = partitions
        case "Redo":
            for state in _value(instruction, "visits", list[Count]):
                record.together.pop(state, None)
                if state in record.visits:
                    epoch, _ = record.visits.pop(state)
                    record.metrics.pop(epoch, None)
        case "EndEpoch":
            epoch = _value(instruction, "epoch", Count)
            record.metrics[epoch] = _value(instruction, "metrics", dict[str, float])
        case "RestTrial":
            record.result_state = _value(instruction, "state", Count)
        case "FinishTrial":
            record.status = _value(instruction, "status", str)
            record.result_state = _value(instruction, "state", Count)
        case "ReopenTrial":
            record.status, record.result_state = TrialRecord.status, TrialRecord.result_state


def _value(entry: dict[str, Any], name: str, hint: Any, default: Any = None) -> Any:
    try:
        return decode(hint, entry.get(name, default), f"{name} in the journal")
    except StoreError as error:
        raise JournalError(str(error)) from error


def result_state(folder: RunFolder, trial: int) -> int:
    """Return the state that is a trial's result.

    Raises:
        ReplayError: there is none: the trial failed, or the run did not end.
    """
    state = read_trial(folder, trial).result_state
    if not state:
        raise ReplayError(
            f"trial {trial} of {folder.path} has no final state: it failed, or its run did not end"
        )
    return state


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

    def windows(
        self, spec: TrialSpec, epoch: int, partitions: Sequence[int]
    ) -> Iterator[list[PartitionBatch]]:
        """Yield the batches of a sub-epoch in its seeded order, a window per optimizer step.

        Of several partitions, those come by turns that were trained by replicas.
        """
        streams = [self._of_partition(spec, epoch, partition) for partition in partitions]
        return replica_windows(streams, spec.accumulate)

    def _of_partition(
        self, spec: TrialSpec, epoch: int, partition: int
    ) -> Iterator[PartitionBatch]:
        part = self.training[partition]
        order = row_order(part.rows, self.seed, epoch, partition)
        for batch in self._batches(part, spec.batch_size, order):
            yield PartitionBatch(batch.features, batch.labels, batch.rows, partition)

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
