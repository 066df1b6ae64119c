"""Defines the trials of the benchmark: nets whose layers wait, so that cores are no bottleneck."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra import SparkEstimator

WIDTH = 16


@torch.library.custom_op("cerebro_hydra_plan::wait", mutates_args=())
def wait(values: Tensor, seconds: float) -> Tensor:
    """Return a copy of the values after so many seconds; it has no gradient."""
    time.sleep(seconds)
    return values.clone()


@wait.register_fake
def _(values: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(values)


class WaitingLayer(nn.Module):
    """Is a linear layer whose forward takes so many seconds, also where backward repeats it."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        """Return the values of the next layer."""
        return self.linear(values + 0 * wait(values.detach(), self.seconds))


class WaitingNet(nn.Module):
    """Is a chain of waiting layers, and an output."""

    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, width)
        self.layers = nn.ModuleList(WaitingLayer(width, seconds) for _ in range(layers))
        self.output = nn.Linear(width, 2)

    def forward(self, features: Tensor) -> Tensor:
        """Return the outputs."""
        values = self.first(features)
        for layer in self.layers:
            values = layer(values)
        outputs: Tensor = self.output(values)
        return outputs


def make(params: Mapping[str, Any]) -> SparkEstimator:
    """Return the estimator of a trial."""
    torch.manual_seed(0)
    net = WaitingNet(params["layers"], params["width"], params["milliseconds"] / 1000)
    return SparkEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        batch_size=8,
        shards=params.get("shards", params["layers"]),
        recompute=params.get("recompute", True),
        schedule=params["schedule"],
        accumulate=params["accumulate"],
    )


def rows(count: int) -> dict[str, np.ndarray]:
    """Return rows of noise."""
    random = np.random.default_rng(0)
    return {
        "features": random.normal(size=(count, WIDTH)).astype("float32"),
        "label": random.integers(0, 2, count),
    }
