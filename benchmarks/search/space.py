"""Defines the space as our searches take it, and the points of it that every part tries."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from benchmarks.search.work import HIGHEST_DECAY, HIGHEST_LR, LOWEST_DECAY, LOWEST_LR, WIDTHS
from cerebro_hydra import hp_choice, hp_log
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.tune.searchers.space import Dimension, draws, grid

SPACE: dict[str, Dimension] = {
    "lr": hp_log(LOWEST_LR, HIGHEST_LR),
    "weight_decay": hp_log(LOWEST_DECAY, HIGHEST_DECAY),
    "width": hp_choice(WIDTHS),
}
GRID: dict[str, Dimension] = {
    "lr": hp_choice(np.geomspace(LOWEST_LR, HIGHEST_LR, 9).tolist()),
    "weight_decay": hp_choice(np.geomspace(LOWEST_DECAY, HIGHEST_DECAY, 3).tolist()),
    "width": hp_choice(WIDTHS),
}


def points(search: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Return the points of the grid, or those that our searches draw by a seed."""
    if search == "grid":
        return grid(GRID)
    return draws(SPACE, count, Random(seed_of(seed, "random search")))
