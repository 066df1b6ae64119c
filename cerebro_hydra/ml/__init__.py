"""Stages of a Spark ML pipeline: estimators that run a search, and the model that they fit.

Importing this package imports neither pyspark nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cerebro_hydra.spark.checks import require_pyspark

if TYPE_CHECKING:
    from cerebro_hydra.ml.estimator import SparkEstimator
    from cerebro_hydra.ml.factory_estimator import FactoryEstimator
    from cerebro_hydra.ml.model import SparkModel
    from cerebro_hydra.ml.tuned_estimator import TunedEstimator

__all__ = ["FactoryEstimator", "SparkEstimator", "SparkModel", "TunedEstimator"]

_HOMES = {
    "FactoryEstimator": "factory_estimator",
    "SparkEstimator": "estimator",
    "SparkModel": "model",
    "TunedEstimator": "tuned_estimator",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_pyspark(name)
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
