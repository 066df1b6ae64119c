"""A factory whose recipes are copies of instances."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from cerebro_hydra.recipe import Recipe

VARIED = (
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
)
"""What of a recipe is plain JSON, and so can vary from trial to trial."""

# All that `Optimizer.__getstate__` keeps, and what LR schedulers put in the way of copies.
_COPIED = ("defaults", "state", "param_groups", "step")


class Copies:
    """Builds recipes of copies of one recipe's instances, which stay as they are.

    Args:
        arguments: of a `Recipe`, by name.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        # Optimizers leave attributes of subclasses out of their own copies.
        self._attributes = {
            name: value
            for name, value in vars(arguments["optimizer"]).items()
            if name not in _COPIED and not name.startswith("_")
        }

    def __call__(self, params: Mapping[str, Any]) -> Recipe:
        """Copy all instances; `params` are options of `VARIED`, or numbers of the optimizer."""
        # Together, so that the optimizer's parameters stay the model's.
        arguments, attributes = copy.deepcopy((self._arguments, self._attributes))
        optimizer = arguments["optimizer"]
        vars(optimizer).update(attributes)
        for name, value in params.items():
            if name in VARIED:
                arguments[name] = value
                continue
            for options in (optimizer.defaults, *optimizer.param_groups):
                options[name] = value
        return Recipe(**arguments)


def numbers_of(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers that an optimizer was made with, unless its param groups differ in them."""
    first, *others = optimizer.param_groups
    return {
        name: first[name]
        for name, value in optimizer.defaults.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if name not in VARIED and all(group[name] == first[name] for group in others)
    }
