"""What a trial is: model, optimizer, loss, metrics and training rules, as data."""

from __future__ import annotations

from cerebro_hydra.recipe.build import build_aside, build_recipe, generator_alone, recipe_of
from cerebro_hydra.recipe.columns import Call, Columns, predictions
from cerebro_hydra.recipe.metrics import Metric, StateMetric, merge_metrics, resolve_metrics
from cerebro_hydra.recipe.randomness import RandomKey, numeric_fingerprint, trial_seed, units
from cerebro_hydra.recipe.recipe import Recipe
from cerebro_hydra.recipe.warm_start import load_warm_start

__all__ = [
    "Call",
    "Columns",
    "Metric",
    "RandomKey",
    "Recipe",
    "StateMetric",
    "build_aside",
    "build_recipe",
    "generator_alone",
    "load_warm_start",
    "merge_metrics",
    "numeric_fingerprint",
    "predictions",
    "recipe_of",
    "resolve_metrics",
    "trial_seed",
    "units",
]
