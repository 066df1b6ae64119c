"""From what a user wrote to a recipe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.columns import Columns
from cerebro_hydra.recipe.recipe import Recipe

# A validator of Spark ML transforms with one model while another thread's trials are admitted.
_generator = threading.RLock()


@contextmanager
def generator_alone() -> Iterator[None]:
    """Within it no other thread builds or admits: the CPU generator is one per process."""
    with _generator:
        yield


def recipe_of(built: Any) -> Recipe:
    """Return the recipe that an `estimator_gen_fn` returned, or whose estimator it returned.

    Raises:
        ConfigurationError: it returned something else.
    """
    recipe = getattr(built, "recipe", built)
    if not isinstance(recipe, Recipe):
        raise ConfigurationError(
            f"estimator_gen_fn returned a {type(built).__name__}; return a SparkEstimator"
        )
    return recipe


def build_recipe(
    factory: Callable[[Any], Any], params: Mapping[str, Any], seed: int, columns: Columns
) -> Recipe:
    """Run the user's factory with the search's seed, so that equal layers start with equal bits."""
    torch.manual_seed(seed)
    return recipe_of(factory(dict(params))).bind(columns)


def build_aside(
    factory: Callable[[Any], Any], params: Mapping[str, Any], seed: int, columns: Columns
) -> Recipe:
    """As `build_recipe`, and the process's random numbers go on as if nothing had been built."""
    with generator_alone(), torch.random.fork_rng(devices=[]):
        return build_recipe(factory, params, seed, columns)
