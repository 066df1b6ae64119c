"""Networks and arrays that the tests of this room train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from cerebro_hydra import SparkEstimator, SparkModel
from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.objective.prediction_kind import PredictionKind
from cerebro_hydra.shards.export.archive import ModelArchive
from cerebro_hydra.shards.export.program import save_exported
from cerebro_hydra.testing.local_backend import Arrays
from cerebro_hydra.tune.model import TrainedModel
from cerebro_hydra.tune.trial import Trial
from cerebro_hydra.tune.weights import ArchiveWeights, ModelFacts


def binary(**arguments: Any) -> SparkEstimator:
    """One score for two classes, made of instances."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    return SparkEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        loss=nn.BCEWithLogitsLoss(),
        batch_size=16,
        **arguments,
    )


def made(params: dict[str, Any]) -> SparkEstimator:
    """As a search's factory makes it."""
    model = nn.Sequential(nn.Linear(4, params["hidden"]), nn.Tanh(), nn.Linear(params["hidden"], 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
    return SparkEstimator(model, optimizer, nn.CrossEntropyLoss())


def arrays(rows: int = 96) -> Arrays:
    random = np.random.default_rng(3)
    features = random.normal(size=(rows, 4)).astype(np.float32)
    label = (features.sum(1) > 0).astype(np.float32)
    return Arrays({"features": features, "label": label})


def saved_model(
    recipe: Recipe, batch: torch.Tensor, folder: Path, kind: PredictionKind
) -> SparkModel:
    """Return a model as a run leaves it, whose files lie in a folder."""
    save_exported(recipe, [batch], folder)
    trial = Trial("trial-000", {"lr": 0.5}, "finished", {"loss": [float("nan"), 0.5]}, [(0, 0)])
    columns = (ColumnSpec("features", "float32", tuple(batch.shape[1:])),)
    told = ModelFacts(kind, columns, ("label",), 16, trial, "run")
    archive = ModelArchive.of(told.metadata(), folder)
    return SparkModel(TrainedModel(ArchiveWeights(archive, "here")))
