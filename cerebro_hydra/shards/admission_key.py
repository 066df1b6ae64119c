"""Makes the key of an admission: trials with equal keys share the outcome of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.model_key import structure_key
from cerebro_hydra.shards.optimizer_clone import NOT_CLONED
from cerebro_hydra.shards.sample import Example

_NOT_ADMITTED = ("model", "optimizer", "warm_start", "early_stopping")
"""Fields of a recipe that are in the key in another form, or decide nothing in a step."""
_FREE_OPTIONS = ("lr", "initial_lr", "weight_decay")


def admission_key(recipe: Recipe, examples: Sequence[Example]) -> Hashable | None:
    """Return a key that is equal where one admission speaks for another, or None if unknown.

    Free are the trial's seed, the values of trainable parameters, which training changes anyway,
    and learning rate and weight decay, as long as they stay zero or not zero. All else that a
    recipe holds is in the key.
    """
    settings = {
        field.name: getattr(recipe, field.name)
        for field in dataclasses.fields(recipe)
        if field.name not in _NOT_ADMITTED
    }
    whole = (recipe.model, _optimizer(recipe), settings, [list(example) for example in examples])
    return structure_key(whole, constants=True)


def _optimizer(recipe: Recipe) -> dict[str, Any]:
    """Return what decides how the optimizer steps, with parameters by name."""
    optimizer: torch.optim.Optimizer = recipe.optimizer
    names = {id(p): name for name, p in recipe.model.named_parameters()}
    own = {key: value for key, value in vars(optimizer).items() if key not in NOT_CLONED}
    groups = [
        _options(group) | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {names[id(p)]: dict(each) for p, each in optimizer.state.items()}
    own["defaults"] = _options(optimizer.defaults)
    return {"class": type(optimizer), "own": own, "groups": groups, "state": state}


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (type(value), value != 0)
        if name in _FREE_OPTIONS and isinstance(value, int | float)
        else value
        for name, value in options.items()
    }
