"""Holds search spaces, searches and their results; importing it imports neither pyspark nor torch.

A result is loaded when it is first named, because that imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from cerebro_hydra.tune.result import SearchResult

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


def __getattr__(name: str) -> object:
    if name != "SearchResult":
        raise AttributeError(f"module 'cerebro_hydra.tune' has no attribute {name!r}")
    from cerebro_hydra.tune.result import SearchResult

    globals()[name] = SearchResult
    return SearchResult
