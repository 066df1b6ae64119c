"""What to try: search spaces, searches and their results.

Importing this package imports neither torch nor pyspark.
"""

from __future__ import annotations

from cerebro_hydra.tune.grid import GridSearch
from cerebro_hydra.tune.result import SearchResult, Trial
from cerebro_hydra.tune.space import hp_choice

__all__ = ["GridSearch", "SearchResult", "Trial", "hp_choice"]
