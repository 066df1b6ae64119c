"""From what a user wrote to a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.columns import Columns
from cerebro_hydra.recipe.recipe import Recipe


def recipe_of(built: Any) -> Recipe:
    """What an `estimator_gen_fn` returned, if it is a recipe."""
    if not isinstance(built, Recipe):
        raise ConfigurationError(
            f"estimator_gen_fn returned a {type(built).__name__}; return a SparkEstimator"
        )
    return built


def build_recipe(
    factory: Callable[[Any], Any], params: Mapping[str, Any], seed: int, columns: Columns
) -> Recipe:
    """Run the user's factory with the search's seed, so that equal layers start with equal bits."""
    torch.manual_seed(seed)
    return recipe_of(factory(dict(params))).bind(columns)
