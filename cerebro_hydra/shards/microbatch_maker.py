"""Makes microbatches of the windows that a reader gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import RandomKey, Recipe, Window
from cerebro_hydra.shards.cut_model import CutModel
from cerebro_hydra.shards.microbatch import Microbatch


class UnfitShape(ConfigurationError):
    """A batch has a shape that the cut model can't take, though the uncut model may."""


class MicrobatchMaker:
    """Collates the batches of one trial and checks their shapes."""

    def __init__(self, cut_model: CutModel, recipe: Recipe, trial_seed: int) -> None:
        self._cut_model = cut_model
        self._recipe = recipe
        self._trial_seed = trial_seed
        self._shapes_seen: set[tuple[torch.Size, ...]] = set()

    def make(self, window: Window, number: int, step: int) -> Microbatch:
        """Return a batch of a window, whose loss counts by its rows.

        Raises:
            UnfitShape: it has a shape that the cut model can't take.
        """
        batch = window[number]
        weight = batch.rows / sum(each.rows for each in window) if len(window) > 1 else None
        key = RandomKey(self._trial_seed, step, number, self._recipe.device)
        made = Microbatch.collated(self._recipe, (batch.features, batch.labels), key, weight)
        self.check_shapes(made.inputs)
        return made

    def check_shapes(self, inputs: Sequence[Tensor]) -> None:
        """Refuse shapes that break an assumption of an exported graph; each is checked once."""
        if self._recipe.collate is None:
            return  # prepared columns have one shape
        shapes = tuple(x.shape for x in inputs)
        if shapes in self._shapes_seen:
            return
        graphs = self._cut_model.graphs
        for guards in graphs.of(inputs).guards if graphs else ():
            if (condition := guards.violated(inputs)) is not None:
                raise UnfitShape(
                    f"collate gave a batch of shapes {[tuple(s) for s in shapes]}, which the cut "
                    f"model can't take: {condition}; give such batches another shape, or shards=1"
                )
        self._shapes_seen.add(shapes)
