"""Holds search spaces, searches and their results; importing it imports no pyspark."""

from __future__ import annotations

from cerebro_hydra.tune.grid_search import GridSearch
from cerebro_hydra.tune.random_search import RandomSearch
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.tune.space import (
    hp_choice,
    hp_int,
    hp_log,
    hp_loguniform,
    hp_qloguniform,
    hp_quniform,
    hp_uniform,
)
from cerebro_hydra.tune.trial import Trial

__all__ = [
    "GridSearch",
    "RandomSearch",
    "SearchResult",
    "Trial",
    "hp_choice",
    "hp_int",
    "hp_log",
    "hp_loguniform",
    "hp_qloguniform",
    "hp_quniform",
    "hp_uniform",
]
