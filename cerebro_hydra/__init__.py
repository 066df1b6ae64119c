"""Selects PyTorch models on Spark: rows stay on their workers, and shards of models hop to them.

A public name is loaded when it is first used, so `import cerebro_hydra` is fast and imports neither
torch nor pyspark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from cerebro_hydra.kernels import choose_for_processes

if TYPE_CHECKING:
    from cerebro_hydra.ml import SparkEstimator, SparkModel, TunedEstimator
    from cerebro_hydra.observe.trackers import MLflowTracker, TensorBoardTracker
    from cerebro_hydra.recipe import StateMetric
    from cerebro_hydra.replay.replay_trial import replay
    from cerebro_hydra.spark import SparkBackend, doctor, local_spark
    from cerebro_hydra.storage import HDFSStore, LocalStore
    from cerebro_hydra.tune import (
        ASHASearch,
        BOHBSearch,
        CustomSearch,
        GridSearch,
        HyperbandSearch,
        MedianStopping,
        OptunaSearch,
        PBTSearch,
        RandomSearch,
        SearchResult,
        SuccessiveHalvingSearch,
        TPESearch,
        hp_choice,
        hp_int,
        hp_log,
        hp_loguniform,
        hp_qloguniform,
        hp_quniform,
        hp_uniform,
    )
    from cerebro_hydra.tune.model import load_model
    from cerebro_hydra.verification import verify
    from cerebro_hydra.wire.credentials import TLS

__version__ = "0.2.0"

choose_for_processes()  # before anything can call MKL

__all__ = [
    "TLS",
    "ASHASearch",
    "BOHBSearch",
    "CustomSearch",
    "GridSearch",
    "HDFSStore",
    "HyperbandSearch",
    "LocalStore",
    "MLflowTracker",
    "MedianStopping",
    "OptunaSearch",
    "PBTSearch",
    "RandomSearch",
    "SearchResult",
    "SparkBackend",
    "SparkEstimator",
    "SparkModel",
    "StateMetric",
    "SuccessiveHalvingSearch",
    "TPESearch",
    "TensorBoardTracker",
    "TunedEstimator",
    "__version__",
    "doctor",
    "hp_choice",
    "hp_int",
    "hp_log",
    "hp_loguniform",
    "hp_qloguniform",
    "hp_quniform",
    "hp_uniform",
    "load_model",
    "local_spark",
    "replay",
    "verify",
]

_HOMES = {
    "TLS": "cerebro_hydra.wire.credentials",
    "ASHASearch": "cerebro_hydra.tune",
    "BOHBSearch": "cerebro_hydra.tune",
    "CustomSearch": "cerebro_hydra.tune",
    "GridSearch": "cerebro_hydra.tune",
    "HDFSStore": "cerebro_hydra.storage",
    "HyperbandSearch": "cerebro_hydra.tune",
    "LocalStore": "cerebro_hydra.storage",
    "MLflowTracker": "cerebro_hydra.observe.trackers",
    "MedianStopping": "cerebro_hydra.tune",
    "OptunaSearch": "cerebro_hydra.tune",
    "PBTSearch": "cerebro_hydra.tune",
    "RandomSearch": "cerebro_hydra.tune",
    "SearchResult": "cerebro_hydra.tune",
    "SparkBackend": "cerebro_hydra.spark",
    "SparkEstimator": "cerebro_hydra.ml",
    "SparkModel": "cerebro_hydra.ml",
    "StateMetric": "cerebro_hydra.recipe",
    "SuccessiveHalvingSearch": "cerebro_hydra.tune",
    "TPESearch": "cerebro_hydra.tune",
    "TensorBoardTracker": "cerebro_hydra.observe.trackers",
    "TunedEstimator": "cerebro_hydra.ml",
    "doctor": "cerebro_hydra.spark",
    "hp_choice": "cerebro_hydra.tune",
    "hp_int": "cerebro_hydra.tune",
    "hp_log": "cerebro_hydra.tune",
    "hp_loguniform": "cerebro_hydra.tune",
    "hp_qloguniform": "cerebro_hydra.tune",
    "hp_quniform": "cerebro_hydra.tune",
    "hp_uniform": "cerebro_hydra.tune",
    "load_model": "cerebro_hydra.tune.model",
    "local_spark": "cerebro_hydra.spark",
    "verify": "cerebro_hydra.verification",
}


def __getattr__(name: str) -> object:
    if name == "replay":
        # The package can be called, so the name means the same whatever was imported first.
        return import_module("cerebro_hydra.replay")
    if name not in _HOMES:
        raise AttributeError(f"module 'cerebro_hydra' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
