"""Models in which something happens late, that admission has not seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from tests.agent.lone_agent import BATCH, COLUMNS, ROWS

STEPS = ROWS // BATCH
RARE = 10
"""The steps after which something happens: admission takes fewer, a sub-epoch more."""
LOW = 0.25
"""A loss that comes in the first sub-epoch, and not before."""


HAPPENS = [False]
"""Whether anything does, which is not so while trials are trained without an agent."""


class Event(nn.Module):
    """Counts its steps in a buffer, and does something in the steps after `RARE`."""

    def __init__(self, after: Callable[[Any, Tensor], object], **attributes: Any) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.after = after
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            if self.steps > RARE and HAPPENS[0]:
                self.after(self, x)
        return x * self.gain

    gain = 1.0


def made(
    middle: nn.Module | None = None,
    loss: nn.Module | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    shards: int = 1,
) -> Recipe:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), middle or nn.Identity(), nn.Linear(16, 16), nn.Linear(16, 3)
    )
    return Recipe(
        model, optimizer(model.parameters(), lr=0.05), loss or nn.CrossEntropyLoss(),
        batch_size=BATCH, shards=shards,
    ).bind(COLUMNS)  # fmt: skip
