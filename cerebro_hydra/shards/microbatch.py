"""A microbatch is one batch on its way through the shards of a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.sample import Example

Reach = Callable[[Literal["F", "B"], int], object]
"""Is called before F or B of a shard begins, and may block until it may."""


@dataclass
class Microbatch:
    """Carries one batch, and its loss when it is known."""

    recipe: Recipe
    features: Sequence[Tensor]
    targets: Sequence[Tensor]
    weight: float | None  # of its loss in a window of several microbatches, else None
    key: RandomKey
    loss: float = float("nan")

    @classmethod
    def collated(
        cls, recipe: Recipe, example: Example, key: RandomKey, weight: float | None
    ) -> Microbatch:
        """Return a batch before shard 0, as `collate` leaves it."""
        features, targets = recipe.collated(*example, key)
        return cls(recipe, features, targets, weight, key)

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Return what the model takes."""
        return self.recipe.inputs(self.features, self.targets)

    def loss_of(self, outputs: Any) -> Tensor:
        """Return the mean loss of the model's outputs."""
        return self.recipe.compute_loss(outputs, self.targets)

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
