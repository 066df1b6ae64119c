"""Trials over texts of variable length that end before their last epoch, each in its own way."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from torch import Tensor

from cerebro_hydra.recipe import Recipe
from tests.end_to_end.trials import growing_batches

LAST_WORDS = "the labels are upside down"
BATCHES = 5  # that the code which raises survives


def odd(params: dict[str, Any]) -> Recipe:
    """A trial that "improves", that does "not improve" and ends early, or that "raises"."""
    does = params["does"]
    recipe = growing_batches.recipe({"lr": 0.0 if does == "not improve" else 0.01})
    plain, seen = recipe.loss, 0

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal seen
        seen += os.getpid() != params["driver"]
        if does == "raises" and seen > BATCHES:
            raise ValueError(LAST_WORDS)
        return plain(outputs, labels)

    early_stopping = 1 if does == "not improve" else None
    return replace(recipe, loss=loss, early_stopping=early_stopping)
