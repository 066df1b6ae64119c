"""Builds copies of a recipe: the factory of an estimator that was made from instances."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from cerebro_hydra.recipe import Recipe, copy_model, referring_to_copies

GRID_OPTIONS = (
    "batch_size",
    "shards",
    "clip_grad_norm",
    "clip_grad_value",
    "accumulate",
    "loss_weights",
    "lr_interval",
    "lr_metric",
    "autocast",
    "ema",
    "early_stopping",
    "schedule",
    "recompute",
)
"""The options of a recipe that are plain JSON, and so can vary from trial to trial."""

# `Optimizer.__getstate__` keeps the first three, and LR schedulers wrap `step`.
_NOT_OWN = ("defaults", "state", "param_groups", "step")


class RecipeCopier:
    """Builds recipes from copies of one recipe's instances, which stay as they are."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        # Optimizers leave attributes of subclasses out of their own copies.
        self._attributes = {
            name: value
            for name, value in vars(recipe.optimizer).items()
            if name not in _NOT_OWN and not name.startswith("_")
        }

    def __call__(self, params: Mapping[str, Any]) -> Recipe:
        """Copy all instances; `params` are `GRID_OPTIONS`, or numbers of the optimizer."""
        # All with one memo, so that the optimizer's parameters stay the model's.
        memo: dict[int, Any] = {}
        copy_model(self._recipe.model, memo)
        recipe, attributes = copy.deepcopy((self._recipe, self._attributes), memo)
        vars(recipe.optimizer).update(attributes)
        options = {name: value for name, value in params.items() if name in GRID_OPTIONS}
        for group in (recipe.optimizer.defaults, *recipe.optimizer.param_groups):
            group.update({name: params[name] for name in params.keys() - options.keys()})
        functions = {
            name: referring_to_copies(getattr(recipe, name), memo)
            for name in ("loss", "metrics", "lr_scheduler", "collate")
        }
        return replace(recipe, **(functions | options))


def optimizer_numbers(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the numbers that an optimizer was made with and all its param groups share."""
    first, *others = optimizer.param_groups
    return {
        name: first[name]
        for name, value in optimizer.defaults.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if name not in GRID_OPTIONS and all(group[name] == first[name] for group in others)
    }
