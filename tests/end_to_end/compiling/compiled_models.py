"""Models whose blocks are compiled, as the agents of a run build them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from tests.shards.compiled_blocks import Block


class SetsAnew(Block):
    """Sets an attribute in each forward, which is taken away before the first one of a visit."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.factor: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.factor = 0.5
        out: Tensor = super().forward(x)
        return out * self.factor


def compiled(params: Mapping[str, Any]) -> Recipe:
    """Return a net of 16 features and 4 classes, three blocks of which are alike."""
    model = nn.Sequential(nn.Linear(16, 12), *(SetsAnew(12) for _ in range(3)), nn.Linear(12, 4))
    return Recipe(
        model,
        torch.optim.AdamW(model.parameters(), params["lr"]),
        nn.CrossEntropyLoss(),
        ["accuracy"],
        batch_size=35,
        shards=params.get("shards", 1),
        recompute=params.get("recompute", "auto"),
        compile=True,
    )
