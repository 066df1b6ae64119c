"""Factories for the tests of this room, which agents in other processes can import."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from cerebro_hydra.recipe import Recipe


def small(params: dict[str, Any]) -> Recipe:
    """Two layers with BatchNorm; `width` may be refused."""
    width = params.get("width", 8)
    if width < 0:
        raise ValueError(f"no layer is {width} wide")
    model = nn.Sequential(
        nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4)
    )
    return Recipe(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=params.get("lr", 0.1), momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        metrics=params.get("metrics", ["accuracy"]),
        batch_size=params.get("batch_size", 16),
        # By name, because a cut by number follows measured times, as do its digests.
        shards=params.get("shards", ["3"]),
    )


class Counting(type):
    """Counts for classes where no reading of a trial looks."""

    @property
    def forwards(cls) -> int:
        return int(os.environ.get(f"CEREBRO_HYDRA_TESTS_{cls.__name__}", "0"))

    @forwards.setter
    def forwards(cls, number: int) -> None:
        os.environ[f"CEREBRO_HYDRA_TESTS_{cls.__name__}"] = str(number)


class Counted(nn.Module, metaclass=Counting):
    """Counts the forwards of all of its instances."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(16, 8), dropout, nn.Linear(8, 4)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        Counted.forwards += 1
        hidden = torch.relu(self.first(features))
        return self.second(nn.functional.dropout(hidden, self.dropout, self.training))


def counted(params: dict[str, Any]) -> Recipe:
    """Build a `Counted`, whose first layer may be scaled."""
    model = Counted(params.get("dropout", 0.1))
    with torch.no_grad():
        model.first.weight.mul_(params.get("scale", 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=params.get("lr", 0.1))
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=16, shards=2)
