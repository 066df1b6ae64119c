"""Defines what a trial is, as data, and what training it means: `PlainTrainer`."""

from __future__ import annotations

from cerebro_hydra.recipe.batch.columns import Columns, ForwardCall, predictions
from cerebro_hydra.recipe.batch.decoded_rows import DecodedRows
from cerebro_hydra.recipe.batch.decoding import Decoder
from cerebro_hydra.recipe.build import (
    build_keeping_random_state,
    build_recipe,
    exclusive_generator,
    load_warm_start,
    recipe_of,
)
from cerebro_hydra.recipe.numerics import (
    exact_by_address,
    fingerprint_differences,
    has_portable_kernels,
    is_portable,
    numeric_fingerprint,
)
from cerebro_hydra.recipe.objective.known_metrics import resolve_metrics
from cerebro_hydra.recipe.objective.metrics import Metric, StateMetric, merge_metrics
from cerebro_hydra.recipe.placement import copy_model, referring_to_copies
from cerebro_hydra.recipe.plain_trainer import (
    BatchTensors,
    Evaluation,
    PlainTrainer,
    RunningEvaluation,
    SumOverRows,
    Window,
    mean,
    merge_evaluations,
    state_tensors,
)
from cerebro_hydra.recipe.randomness import RandomKey, trial_seed, units
from cerebro_hydra.recipe.recipe import Recipe

__all__ = [
    "BatchTensors",
    "Columns",
    "DecodedRows",
    "Decoder",
    "Evaluation",
    "ForwardCall",
    "Metric",
    "PlainTrainer",
    "RandomKey",
    "Recipe",
    "RunningEvaluation",
    "StateMetric",
    "SumOverRows",
    "Window",
    "build_keeping_random_state",
    "build_recipe",
    "copy_model",
    "exact_by_address",
    "exclusive_generator",
    "fingerprint_differences",
    "has_portable_kernels",
    "is_portable",
    "load_warm_start",
    "mean",
    "merge_evaluations",
    "merge_metrics",
    "numeric_fingerprint",
    "predictions",
    "recipe_of",
    "referring_to_copies",
    "resolve_metrics",
    "state_tensors",
    "trial_seed",
    "units",
]
