"""Builds recipes with the user's factory, with random numbers under control."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.columns import Columns
from cerebro_hydra.recipe.meta_model import give_memory, is_on_meta
from cerebro_hydra.recipe.meta_operations import MetaOperations
from cerebro_hydra.recipe.recipe import Recipe


class GeneratorLock:
    """A lock that a thread may take several times, and that can be taken from one that hangs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._owner in (None, me))
            self._owner = me
            self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            if self._owner == threading.get_ident():  # else it was taken from this thread
                self._depth -= 1
                self._free_if(self._depth == 0)

    def take_from(self, thread: int) -> None:
        """Free the lock if this thread, which must never go on, has it."""
        with self._changed:
            self._free_if(self._owner == thread)

    def _free_if(self, free: bool) -> None:
        if free:
            self._owner, self._depth = None, 0
            self._changed.notify()


# There is one CPU generator per process, and a validator of Spark ML transforms with one model
# while another thread's trials are admitted.
exclusive_generator = GeneratorLock()
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
    """Run the user's factory with the search's seed, so that equal layers start with equal bits.

    A model on the meta device gets memory for the values that `warm_start` has.
    """

    def build() -> Recipe:
        torch.manual_seed(seed)
        return recipe_of(factory(dict(params)))

    recipe = build()
    if is_on_meta(recipe.model):
        with MetaOperations() as operations:
            recipe = build()
        give_memory(recipe, operations)
    return recipe.bind(columns)


def build_keeping_random_state(
    factory: Callable[[Any], Any], params: Mapping[str, Any], seed: int, columns: Columns
) -> Recipe:
    """Build a recipe and leave the process's random numbers as if nothing had been built."""
    with exclusive_generator, torch.random.fork_rng(devices=[]):
        return build_recipe(factory, params, seed, columns)
