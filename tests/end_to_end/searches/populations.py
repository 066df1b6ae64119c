"""A model whose trials differ in what a fork may change, and a population of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.tune import PBTSearch, hp_choice, hp_log, hp_quniform, hp_uniform
from tests.end_to_end.searches.counted_store import CountedStore
from tests.end_to_end.searches.early_searches import search

__all__ = ["CountedStore", "changeable", "population"]  # agents import the store with the factory


def changeable(params: dict[str, Any]) -> Recipe:
    """Return two layers with dropout, whose options all come from the parameters."""
    width = params.get("width", 8)
    model = nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Dropout(params["dropout"]), nn.Linear(width, 4)
    )
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=params["lr"],
        momentum=params["momentum"],
        weight_decay=params["weight_decay"],
    )
    return Recipe(
        model=model,
        optimizer=optimizer,
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=params["batch_size"],
        shards=["3"],
    )


SPACE = {
    "lr": hp_log(1e-3, 1.0),
    "momentum": hp_uniform(0.1, 0.95),
    "weight_decay": hp_log(1e-6, 1e-2),
    "dropout": hp_quniform(0.1, 0.5, 0.1),
    "batch_size": hp_choice([8, 16, 32]),
}
FIXED = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 16}


def population(folder: Path, **options: Any) -> Any:
    """Return a population of four, of which one gives way after each of three epochs."""
    given = {
        "estimator_gen_fn": changeable,
        "search_space": SPACE,
        "num_models": 4,
        "num_epochs": 4,
        "mutations": list(SPACE),
        "order": "seeded",
        **options,
    }
    return search(PBTSearch, folder, **given)
