"""Networks and arrays that the tests of this room train."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from cerebro_hydra import SparkEstimator
from cerebro_hydra.testing.local_backend import Arrays


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
