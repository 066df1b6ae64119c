"""Holds search spaces, searches and their results; importing it imports no pyspark."""

from __future__ import annotations

from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.tune.rung_searches import (
    ASHASearch,
    BOHBSearch,
    HyperbandSearch,
    PBTSearch,
    SuccessiveHalvingSearch,
)
from cerebro_hydra.tune.sampled_searches import OptunaSearch, TPESearch
from cerebro_hydra.tune.searchers.median_stopping import MedianStopping
from cerebro_hydra.tune.searchers.searcher import Fork, Pause, Searcher, Stop, TrainTo
from cerebro_hydra.tune.searchers.space import (
    hp_choice,
    hp_int,
    hp_log,
    hp_loguniform,
    hp_qloguniform,
    hp_quniform,
    hp_uniform,
)
from cerebro_hydra.tune.searches import CustomSearch, GridSearch, RandomSearch
from cerebro_hydra.tune.trial import Trial

__all__ = [
    "ASHASearch",
    "BOHBSearch",
    "CustomSearch",
    "Fork",
    "GridSearch",
    "HyperbandSearch",
    "MedianStopping",
    "OptunaSearch",
    "PBTSearch",
    "Pause",
    "RandomSearch",
    "SearchResult",
    "Searcher",
    "Stop",
    "SuccessiveHalvingSearch",
    "TPESearch",
    "TrainTo",
    "Trial",
    "hp_choice",
    "hp_int",
    "hp_log",
    "hp_loguniform",
    "hp_qloguniform",
    "hp_quniform",
    "hp_uniform",
]
