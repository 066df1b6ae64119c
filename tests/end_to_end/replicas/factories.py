"""Factories of trials with replicas that agents in other processes can import."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cerebro_hydra.recipe import Recipe


class Scaled(nn.Module):
    """Chooses a scale that trains by its first batch, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(16)), nn.Linear(16, 4)
        self.register_buffer("begun", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.begun:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0) + 0.1))
                self.begun.fill_(1)
        return self.layer(x * self.scale)


def scaled(params: dict[str, Any]) -> Recipe:
    """Write to a parameter by the first rows, with or without replicas."""
    model = Scaled()
    return Recipe(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=8,
        replicas=params["replicas"],
    )


def normalized(params: dict[str, Any]) -> Recipe:
    """BatchNorm, dropout, clipping, a moving average, a schedule and accumulation together."""
    model = nn.Sequential(
        nn.Linear(16, 24),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Dropout(params.get("dropout", 0.2)),
        nn.Linear(24, 24),
        nn.BatchNorm1d(24, momentum=None),
        nn.ReLU(),
        nn.Linear(24, 4),
    )

    def schedule(optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
        steps = params["epochs"] * steps_per_epoch  # one more would be an error
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)

    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=params.get("batch_size", 8),
        shards=params.get("shards", 1),
        lr_scheduler=schedule,
        clip_grad_norm=params.get("clip"),
        accumulate=params.get("accumulate", 1),
        ema=params.get("ema"),
        replicas=params["replicas"],
    )
