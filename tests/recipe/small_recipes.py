"""Recipes of one small model, with one thing changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cerebro_hydra.recipe import Recipe


def recipe_of(model: nn.Module | None = None, loss: Any = None, **rules: Any) -> Recipe:
    """Return a recipe of a model, else of a linear one with three inputs and one output."""
    model = model or nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, loss or nn.MSELoss(), **rules)
