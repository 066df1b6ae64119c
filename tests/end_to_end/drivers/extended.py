"""A factory whose loss fails while there is a file of the name that it is given."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from tests.end_to_end import models


class FailingLoss(nn.CrossEntropyLoss):
    """Cross entropy, which the file makes fail when it measures so many rows, or any."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if os.path.exists(self.marker) and (self.training or os.path.getsize(self.marker)):
            raise ValueError("a mistake that shows late")
        return super().forward(outputs, labels)


def fails_late(params: dict[str, Any]) -> Recipe:
    """Return a recipe that trains until the file is there."""
    recipe = models.feed_forward(params)
    return Recipe(
        model=recipe.model,
        optimizer=recipe.optimizer,
        loss=FailingLoss(params["marker"]),
        metrics=["accuracy"],
        batch_size=16,
        shards=2,
    )
