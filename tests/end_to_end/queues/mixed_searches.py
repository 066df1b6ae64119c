"""Searches over the trials of `mixed_models`, and the rows that all of them train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cerebro_hydra import GridSearch
from cerebro_hydra.testing.local_backend import Arrays
from tests.end_to_end.queues.mixed_models import TOKENS, VOCABULARY, mixed
from tests.end_to_end.runs import frame_of, grid

LARGEST_STATE = 2_983_104  # bytes of gpt2's, with gradients
TEXT = np.random.default_rng(3).integers(0, VOCABULARY, (48, TOKENS))


def search(backend: Any, path: Path, names: tuple[str, ...], **options: Any) -> GridSearch:
    """Return a search over one trial of each model, for an epoch unless the options say more."""
    given = {"num_epochs": 1, "evaluation_metric": "loss", **options}
    space, factory = given.pop("space", {"model": names}), given.pop("factory", mixed)
    return grid(backend, path, factory, space, **given)


def cut_to_fit(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the space of these models with shards that the devices can hold."""
    return {"model": names, "shards": ["auto"]}


def dataframe(spark: Any, rows: int) -> Any:
    """Return the first rows."""
    return frame_of(spark, Arrays({"features": TEXT[:rows], "label": TEXT[:rows]}))
