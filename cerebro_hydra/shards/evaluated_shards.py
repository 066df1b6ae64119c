"""An evaluation of one trial: binds its shards to memory, measures batches, and lets shards go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.recipe import BatchTensors, Evaluation, Recipe, RunningEvaluation
from cerebro_hydra.shards.bound_model import BoundModel, bound_model
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.graph_tasks import GraphPredictor
from cerebro_hydra.shards.held_tensors import HeldTensors, check_released, storages
from cerebro_hydra.shards.layout import Segments, TrialLayout
from cerebro_hydra.shards.memory_watch import MemoryLimit
from cerebro_hydra.shards.microbatch import Reach
from cerebro_hydra.shards.microbatch_maker import MicrobatchMaker
from cerebro_hydra.shards.module_tasks import ModulePredictor
from cerebro_hydra.shards.state import ShardState


class EvaluatedShards:
    """Holds the shards of a trial that is evaluated, each from `receive` to `release`.

    The forward writes to copies of the buffers, which stay to the end.

    Args:
        shared: the parameters that a batch may read while their shard is away.
        limit: bounds what forwards hold of the device beside their shards; None does not.
        on_outputs: is called with the model's outputs for each batch.
    """

    def __init__(
        self,
        cut_model: CutModel,
        layout: TrialLayout,
        recipe: Recipe,
        maker: MicrobatchMaker,
        shared: Collection[str] = (),
        limit: MemoryLimit | None = None,
        on_outputs: Callable[[Any], object] | None = None,
    ) -> None:
        self._cut_model = cut_model
        self._layout = layout
        self._recipe = recipe
        self._maker = maker
        self._limit = limit
        self._on_outputs = on_outputs
        self._held = HeldTensors(shared)
        self._states: dict[int, ShardState] = {}
        self._bound: BoundModel | None = None
        self._predictor: GraphPredictor | ModulePredictor
        self._evaluation = RunningEvaluation(recipe)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let batches be measured for a while."""
        try:
            if self._cut_model.graphs is not None:
                self._predictor = GraphPredictor(self._cut_model, self._states, self._held)
                yield
                return
            model = self._recipe.model.eval()
            with bound_model(model) as self._bound:
                self._predictor = ModulePredictor(self._cut_model, self._recipe)
                with self._predictor.attached():
                    yield
        finally:
            self._states.clear()
            self._held.copies.clear()

    def __contains__(self, k: int) -> bool:
        """Return whether a shard is here."""
        return k in self._states

    def receive(self, k: int, segments: Segments) -> None:
        """Bind a shard to memory, which is read until the shard is released."""
        state = ShardState(self._layout.shards[k], segments)
        state.values |= state.ema
        self._states[k] = state
        if self._bound is not None:
            self._bound.bind_values(state)
        self._hold(state)

    def _hold(self, state: ShardState) -> None:
        copies = self._held.hold(state)
        if self._bound is not None:
            self._bound.use_copies(copies)

    def release(self, k: int, needed: bool) -> None:
        """Refer to a shard's memory no more.

        Args:
            needed: whether the batch under way has been through the shard.

        Raises:
            ConfigurationError: the forward keeps a view of a parameter.
        """
        state = self._states.pop(k)
        if self._bound is not None:
            self._bound.unbind(state, self._held.copies)
        memory = storages(state)
        del state
        if needed:
            check_released(memory)

    def begin_batch(self) -> None:
        """Hold copies, from now on, of what is read while its shard is away."""
        for state in self._states.values():
            self._hold(state)

    def end_batch(self) -> None:
        """Hold copies of parameters no more."""
        for state in self._states.values():
            names = self._held.drop(state.values)
            if self._bound is not None:
                self._bound.end_copies(names, state)
        names = self._held.drop([p.name for p in self._cut_model.params])
        if self._bound is not None:
            self._bound.end_copies(names)

    def run(self, batch: BatchTensors, reach: Reach) -> None:
        """Measure a batch, after `reach` has allowed F of each shard.

        Raises:
            NonFiniteLoss: its loss is NaN or infinite.
        """
        recipe = self._recipe
        features, targets = recipe.collated(batch.features, batch.labels, None)
        inputs = recipe.inputs(features, targets)
        self._maker.check_shapes(inputs)
        with torch.no_grad(), recipe.precision():
            outputs = self._outputs(inputs, reach)
            if self._on_outputs is not None:
                self._on_outputs(outputs)
            loss = recipe.compute_loss(outputs, targets).item()
            self._evaluation.add(loss, outputs, targets, batch.rows)

    def _outputs(self, inputs: Sequence[Tensor], reach: Reach) -> Any:
        if self._limit is None:
            return self._predictor.run(inputs, reach)
        with self._limit.kept(inputs, self._held.copies.values(), reach) as watched:
            return self._predictor.run(inputs, watched)

    def result(self) -> Evaluation:
        """Return what the batches so far have given."""
        return self._evaluation.result()
