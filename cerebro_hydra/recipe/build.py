"""Builds recipes with the user's factory, with random numbers under control."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.columns import Columns
from cerebro_hydra.recipe.recipe import Recipe

# There is one CPU generator per process, and a validator of Spark ML transforms with one model
# while another thread's trials are admitted.
exclusive_generator = threading.RLock()
"""Keeps other threads from building, admitting and replaying."""


def recipe_of(built: Any) -> Recipe:
    """Return the recipe that an `estimator_gen_fn` returned, or whose estimator it returned.

    Raises:
        ConfigurationError: it returned something else.
    """
    recipe = getattr(built, "recipe", built)
    if not isinstance(recipe, Recipe):
        kind = (
            f"the class {built.__name__}"
            if isinstance(built, type)
            else f"a {type(built).__name__}"
        )
        raise ConfigurationError(
            f"estimator_gen_fn returned {kind}; return a SparkEstimator or a Recipe"
        )
    return recipe


def build_recipe(
    factory: Callable[[Any], Any], params: Mapping[str, Any], seed: int, columns: Columns
) -> Recipe:
    """Run the user's factory with the search's seed, so that equal layers start with equal bits."""
    torch.manual_seed(seed)
    return recipe_of(factory(dict(params))).bind(columns)


def build_keeping_random_state(
    factory: Callable[[Any], Any], params: Mapping[str, Any], seed: int, columns: Columns
) -> Recipe:
    """Build a recipe and leave the process's random numbers as if nothing had been built."""
    with exclusive_generator, torch.random.fork_rng(devices=[]):
        return build_recipe(factory, params, seed, columns)
