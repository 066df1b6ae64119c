"""A factory whose loss fails while there is a file of the name that it is given."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
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


class Changing:
    """A factory whose code is another one for each word that its file holds."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.write_text("as it was")

    def __call__(self, params: dict[str, Any]) -> Recipe:
        return changed(self.place.read_text(), params)


class Shift:
    """A collate that moves features, by a value that is no code."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, batch: dict[str, Any], training: bool) -> dict[str, Any]:
        return {**batch, "features": batch["features"] + self.by}


def changed(how: str, params: dict[str, Any]) -> Recipe:
    """Return a recipe that has been changed in one thing."""
    if how == "broken":
        raise ValueError("a mistake that shows at once")
    width, act = (33 if how == "wider" else 32), (nn.Tanh() if how == "tanh" else nn.ReLU())
    model = nn.Sequential(nn.Linear(16, width), act, nn.Linear(width, 4))
    if how == "names":
        model = nn.Sequential(OrderedDict(a=model[0], b=act, c=model[2]))
    lr = 0.1 if how == "lr" else params["lr"]
    more: dict[str, Any] = {
        "ema": {"ema": 0.9},
        "scheduler": {"lr_scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)},
        "accumulate": {"accumulate": 2},
        "batch_size": {"batch_size": 8},
        "metric": {"metrics": ["accuracy", "mae"]},
    }.get(how, {})
    smooth = 0.1 if how == "loss" else 0.0
    return Recipe(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        loss=nn.CrossEntropyLoss(label_smoothing=smooth),
        collate=Shift(0.5 if how == "shifted" else 0.0),
        **{"metrics": ["accuracy"], "batch_size": 16, "shards": 2, **more},
    )
