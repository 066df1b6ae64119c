"""Searches over the trials of `mixed_models`, and the rows that all of them train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cerebro_hydra import GridSearch, LocalStore, hp_choice
from tests.end_to_end.queues.mixed_models import TOKENS, VOCABULARY, mixed

LARGEST_STATE = 2_983_104  # bytes of gpt2's, with gradients
TEXT = np.random.default_rng(3).integers(0, VOCABULARY, (48, TOKENS))


def search(backend: Any, path: Path, names: tuple[str, ...], **options: Any) -> GridSearch:
    """Return a search over one trial of each model, for an epoch unless the options say more."""
    given = {
        "estimator_gen_fn": mixed,
        "search_space": {"model": hp_choice(list(names))},
        "num_epochs": 1,
        "evaluation_metric": "loss",
        "verbose": 0,
    }
    return GridSearch(
        backend=backend, store=LocalStore(prefix_path=str(path)), **{**given, **options}
    )


def cut_to_fit(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the space of these models with shards that the devices can hold."""
    return {"model": hp_choice(list(names)), "shards": hp_choice(["auto"])}


def dataframe(spark: Any, rows: int) -> Any:
    """Return the first rows."""
    tokens = TEXT[:rows].tolist()
    columns = "features array<long>, label array<long>"
    return spark.createDataFrame([(row, row) for row in tokens], columns)
