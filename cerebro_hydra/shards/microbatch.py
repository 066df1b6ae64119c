"""A microbatch is one batch on its way through the shards of a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.sample import Example

Reach = Callable[[Literal["F", "B"], int], object]
"""Is called before F or B of a shard begins, and may block until it may."""


@dataclass
class Microbatch:
    """Carries the inputs of one batch, the way to its loss, and the loss when it is known."""

    inputs: Sequence[Tensor]
    loss_of: Callable[[Any], Tensor]
    weight: float | None  # of its loss in a window of several microbatches, else None
    key: RandomKey
    loss: float = float("nan")

    @classmethod
    def collated(
        cls, recipe: Recipe, example: Example, key: RandomKey, weight: float | None
    ) -> Microbatch:
        """Return a batch before shard 0, as `collate` leaves it."""
        features, targets = recipe.collated(*example, key)
        loss_of = partial(recipe.compute_loss, targets=targets)
        return cls(recipe.inputs(features, targets), loss_of, weight, key)

    def finish_forward(self, loss: Tensor) -> None:
        """Note the loss.

        Raises:
            NonFiniteLoss: it is NaN or infinite.
        """
        self.loss = loss.item()
        if not math.isfinite(self.loss):
            raise NonFiniteLoss(
                f"the loss is {self.loss} at step {self.key.step}, batch {self.key.microbatch} of "
                "its window; try a lower learning rate or clip_grad_norm"
            )
