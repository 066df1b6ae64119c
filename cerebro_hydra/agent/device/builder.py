"""Builds what an agent needs to train one trial: recipe, cut, layout and engine, once each.

It decodes the partitions that are an agent's own, too.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from cerebro_hydra.data.batches import (
    Batch,
    batch_sizes,
    batches,
    replica_windows,
    row_order,
    windows,
)
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.data.partition import CachedPartition
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import (
    BatchTensors,
    Columns,
    DecodedRows,
    Recipe,
    build_keeping_random_state,
    build_recipe,
)
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.shards.admission.effects.as_built import AsBuilt
from cerebro_hydra.shards.admission.effects.held_state import package_of
from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory
from cerebro_hydra.shards.admission.effects.object_reader import ObjectReader
from cerebro_hydra.shards.admission.same_trial import check_same_trial
from cerebro_hydra.shards.cut.model import CutModelCache, Recent
from cerebro_hydra.shards.cut.model_key import structure_key
from cerebro_hydra.shards.cut.sample import Example, Sample
from cerebro_hydra.shards.cut.second_names import SecondNames
from cerebro_hydra.shards.cut.spec import CutSpec
from cerebro_hydra.shards.cut.values import absent_value
from cerebro_hydra.shards.engine.layout import TrialLayout, TrialRuntime
from cerebro_hydra.shards.engine.microbatch import OtherBatch
from cerebro_hydra.shards.engine.optimizer import StateTemplate
from cerebro_hydra.shards.heap import LEAST_TRIMMED, trim_heap
from cerebro_hydra.storage import Store
from cerebro_hydra.storage.run_document import RunDocument, TrialSpec

EXAMPLE_ROWS = 4
"""Rows in the batch that a model is traced with; the batch dimension is dynamic."""


MOST_RUNTIMES = 64
"""Trials that an agent keeps ready to train; it builds the others anew when they come back."""

MOST_RUNTIME_BYTES = 256 << 20
"""Bytes that their buffers may have together."""


@dataclass(frozen=True)
class BuiltTrial:
    """Holds one trial that was built on this agent.

    Args:
        build_seconds: what the user's factory took.
        as_built: what it has left of what trials share.
    """

    spec: TrialSpec
    runtime: TrialRuntime
    build_seconds: float
    as_built: AsBuilt

    @property
    def nbytes(self) -> int:
        """Return the bytes of the model's buffers, which are not freed like its parameters."""
        return sum(buffer.nbytes for buffer in self.runtime.recipe.model.buffers())


class TrialBuilder:
    """Builds trials with the user's factory, and keeps those that were used last.

    Equal models are exported and cut once. A trial that is built anew has the same bits, because
    its state comes from the shards alone, as on another worker.

    Args:
        device: where the trials are trained; they are built and cut on the CPU.
        scratch: a folder where decoded rows are kept for all trials; None keeps none.
        rows: how many rows each training partition has, those of other workers included.
    """

    def __init__(
        self,
        document: RunDocument,
        factory: Callable[..., Any],
        training: dict[int, CachedPartition],
        validation: dict[int, CachedPartition],
        device: torch.device = CPU,
        scratch: str | None = None,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        self._document = document
        self._rows = rows or {}
        self._device = device
        self._decoded = None if scratch is None else DecodedRows(scratch, _decoder_key)
        self._columns = Columns.of(document)
        self._factory = IsolatedFactory(factory)
        self._training = training
        self._validation = validation
        self._cut_models = CutModelCache(device)
        self._specs: dict[int, TrialSpec] = {}
        self._built = Recent[int, BuiltTrial](
            MOST_RUNTIMES, MOST_RUNTIME_BYTES, lambda built: built.nbytes
        )

    def add(self, spec: TrialSpec) -> None:
        """Take in what a trial is, before anything else is asked of it."""
        self._specs[spec.trial] = spec

    @property
    def audit_share(self) -> float:
        """Return how much of the training time may be taken to compare it with plain training."""
        return self._document.audit_share

    def forget(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._specs.pop(trial, None)
        self._built.drop(trial)

    def has(self, partition: int) -> bool:
        """Return whether the rows of a partition are here."""
        return partition in self._training

    def add_partitions(
        self, training: dict[int, CachedPartition], validation: dict[int, CachedPartition]
    ) -> None:
        """Take in further partitions, from another thread than the one that trains."""
        self._training = {**self._training, **training}
        self._validation = {**self._validation, **validation}

    def get(self, trial: int) -> BuiltTrial:
        """Return a trial; runs the user's factory unless it is kept."""
        return self._built.get(trial, lambda: self._build(self._specs[trial]))

    def keeps(self, trial: int) -> bool:
        """Return whether the trial is ready to train."""
        return trial in self._built

    def _build(self, spec: TrialSpec) -> BuiltTrial:
        begun = time.perf_counter()
        recipe = self._built_recipe(spec)
        build_seconds = time.perf_counter() - begun
        batch = partial(self._example, spec.batch_size)
        if check_same_trial(spec.code, recipe, batch, spec.seed, self._factory.factory):
            recipe = self._built_recipe(spec)
        changes = spec.attributes, spec.set_in_evaluation
        as_built = AsBuilt.now(recipe, *changes, self._factory.factory)
        second_names = SecondNames(recipe.model)  # before a cut model refers to tensors, too
        sample = Sample.of(recipe, self._example(EXAMPLE_ROWS), as_built.settings)
        cut_model = self._cut_models.get(recipe.model, CutSpec.from_json(spec.cut), sample)
        layout = TrialLayout.make(recipe, cut_model, StateTemplate.from_json(spec.template))
        spoilt = second_names.spoil(cut_model.spec.written)
        recipe = self._placed(recipe)
        runtime = TrialRuntime(
            recipe, cut_model, layout, spec.seed, spec.steps_per_epoch, spec.staleness, spoilt
        )
        return BuiltTrial(spec, runtime, build_seconds, as_built)

    def _example(self, rows: int) -> Example:
        """Return the first rows of a partition, at most as many."""
        part = next(iter(self._training.values()))
        batch = next(self._batches(part, min(rows, part.rows), None))
        return batch.features, batch.labels

    def _built_recipe(self, spec: TrialSpec) -> Recipe:
        with AsBuilt.building():
            return build_recipe(self._factory, spec.params, self._document.seed, self._columns)

    def _placed(self, recipe: Recipe) -> Recipe:
        """Free the weights of a recipe, and bring the rest of it to the device."""
        _free_weights(recipe)
        if self._decoded is not None:
            recipe.keep_decoded(self._decoded)
        return recipe.to(self._device)

    def another_recipe(self, trial: int) -> Recipe:
        """Run the user's factory again, while no engine uses the trial's model; free the weights.

        The process's random numbers go on as if nothing had been built.

        Raises:
            ConfigurationError: the factory gave a part of the same model again.
        """
        mine = self.get(trial)
        with AsBuilt.building():
            other = build_keeping_random_state(
                self._factory, mine.spec.params, self._document.seed, self._columns
            )
        SecondNames(other.model).spoil(mine.runtime.cut_model.spec.written)
        if not set(_parts(mine.runtime.recipe.model)).isdisjoint(_parts(other.model)):
            # The factory may have changed the model, which fits the newer recipe then.
            newer = replace(mine.runtime, recipe=self._placed(other))
            self._built.put(trial, replace(mine, runtime=newer))
            raise ConfigurationError(
                "estimator_gen_fn gives the same model twice; let it build one at each call"
            )
        return self._placed(other)

    def windows(
        self, trial: int, epoch: int, partition: int, first: int = 0
    ) -> Iterator[Sequence[Batch]]:
        """Yield the batches of a sub-epoch in its seeded order, a window per optimizer step.

        Args:
            first: the window that comes first.
        """
        spec = self._specs[trial]
        part = self._training[partition]
        order = row_order(part.rows, self._document.seed, epoch, partition)
        order = order[first * spec.accumulate * spec.batch_size :]
        stream = self._batches(part, spec.batch_size, order)
        return windows(stream, spec.accumulate)

    def replica_windows(
        self, trial: int, epoch: int, partitions: Sequence[int], rank: int
    ) -> Iterator[Sequence[BatchTensors]]:
        """Yield the windows of a sub-epoch with replicas; of other ranks' batches only the rows."""
        spec = self._specs[trial]
        streams: list[Iterator[BatchTensors]] = [
            map(OtherBatch, batch_sizes(self._rows[partition], spec.batch_size))
            for partition in partitions
        ]
        part = self._training[partitions[rank]]
        order = row_order(part.rows, self._document.seed, epoch, partitions[rank])
        streams[rank] = self._batches(part, spec.batch_size, order)
        return replica_windows(streams, spec.accumulate)

    def rounds(self, trial: int, partitions: Sequence[int]) -> int:
        """Return how many batches the largest partition has of a sub-epoch with replicas."""
        size = self._specs[trial].batch_size
        return max(len(batch_sizes(self._rows[each], size)) for each in partitions)

    def validation(self, trial: int, partition: int) -> Iterator[Batch]:
        """Yield the validation rows of a partition, in stored order."""
        spec = self._specs[trial]
        return self._batches(self._validation[partition], spec.batch_size, None)

    def _batches(self, part: CachedPartition, batch_size: int, order: Any) -> Iterator[Batch]:
        return batches(part, self._columns.features, self._columns.targets, batch_size, order)


def _parts(model: nn.Module) -> Iterator[int]:
    """Yield the identities of a model's modules, parameters and buffers."""
    return map(id, itertools.chain(model.modules(), model.parameters(), model.buffers()))


def _free_weights(recipe: Recipe) -> None:
    """Free the weights that the factory made: only their names are needed, states are fetched."""
    recipe.optimizer.state.clear()
    freed = 0
    for parameter in recipe.model.parameters():
        freed += parameter.nbytes
        parameter.data = absent_value(parameter)
    if freed >= LEAST_TRIMMED:
        gc.collect()  # torch.export leaves its copy of the model in reference cycles
    trim_heap(freed)


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


def _decoder_key(decoder: Any) -> Hashable | None:
    """Return a key that is equal for decoders that do the same, also by the globals they name."""
    key = structure_key(decoder, constants=True)
    if key is None or not callable(decoder):
        return key
    with suppress(Exception):  # what can't be read is told from all others
        reader = ObjectReader({}, {package_of(decoder)})
        reader.read("the decoder", decoder)
        reader.read_code()
        return key, tuple(sorted(reader.found.items()))
    return None
