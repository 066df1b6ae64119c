"""Uses Spark: sessions, their checks, agents as Spark tasks, data preparation, transform.

Importing this package imports neither pyspark nor torch and starts no Java.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cerebro_hydra.spark.backend import SparkBackend
    from cerebro_hydra.spark.launcher import SparkLauncher
    from cerebro_hydra.spark.preflight import doctor
    from cerebro_hydra.spark.session import local_spark

__all__ = ["SparkBackend", "SparkLauncher", "doctor", "local_spark"]

_HOMES = {
    "SparkBackend": "backend",
    "SparkLauncher": "launcher",
    "doctor": "preflight",
    "local_spark": "session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
