"""A trial with a shard per layer, so that each is much smaller than the whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore, RunFolder
from tests.agent.lone_agent import BATCH, COLUMNS, train_without_agent

WIDTH, BLOCKS = 32, 6
CUTS = [str(4 + 2 * block) for block in range(BLOCKS)]


def many_shards(cut: str, frozen: bool = False, width: int = WIDTH, **options: Any) -> Recipe:
    torch.manual_seed(3)
    blocks = [m for _ in range(BLOCKS) for m in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), *blocks,
        nn.Linear(width, 3),
    )  # fmt: skip
    model[6].requires_grad_(not frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    loss = nn.CrossEntropyLoss()
    made = Recipe(model, optimizer, loss, batch_size=BATCH, shards=CUTS, cut=cut, **options)
    return made.bind(COLUMNS)


_folder = TemporaryDirectory(prefix="cerebro-hydra-")
ALL: dict[str, Any] = {"accumulate": 5, "clip_grad_norm": 0.1, "ema": 0.9, "frozen": True}


@functools.cache
def trained_many(
    cut: str, everything: bool = False, width: int = WIDTH
) -> tuple[RunFolder, Callable[[], Recipe]]:
    """Return the run of such a trial that was trained without an agent, and its factory."""
    factory = functools.partial(many_shards, cut, width=width, **(ALL if everything else {}))
    store = LocalStore(f"{_folder.name}/{cut}-{everything}-{width}")
    return train_without_agent(store, factory), factory
