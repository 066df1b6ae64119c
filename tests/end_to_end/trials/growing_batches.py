"""Trials whose later batches are longer than those that were measured before training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.testing.local_backend import Arrays

SHORT, LONG, ENDLESS = 4, 12, 60


class Block(nn.Module):
    """Works on each position of a text alone; only `wide` inside of it holds much."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Texts(nn.Module):
    """Some blocks over the words of a text, and a class."""

    def __init__(self, width: int = 16, blocks: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def recipe(params: dict[str, Any]) -> Recipe:
    """A trial whose batches are short but now and then, by the draws of its steps."""
    model = Texts()
    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        batch_size=8,
        shards=params.get("shards", "auto"),
        cut=params.get("cut", "export"),
        ema=params.get("ema"),
        collate=COLLATES[params.get("batches", "long")],
    )


def _drawn(batch: dict[str, Tensor], training: bool, longest: int) -> dict[str, Tensor]:
    length = SHORT
    if training and torch.rand(()) < 0.1:
        length = longest
    return batch | {"features": batch["features"][:, :length]}


def long(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    """Three times as long, now and then."""
    return _drawn(batch, training, LONG)


def endless(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    """Longer than any cut allows, now and then."""
    return _drawn(batch, training, ENDLESS)


def never(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    """Always as short."""
    return _drawn(batch, training, SHORT)


COLLATES = {"long": long, "endless": endless, "never": never}


def texts(rows: int = 60) -> Arrays:
    draw = np.random.default_rng(5)
    words = draw.integers(0, 32, (rows, ENDLESS))
    return Arrays({"features": words, "label": draw.integers(0, 3, rows)})
