"""Factories that agents in other processes can import."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from tests.shards.zoo import LongSkips


def feed_forward(params: dict[str, Any]) -> Recipe:
    """A small net; `frozen` keeps its first layer, `dropout` makes it stochastic."""
    model = nn.Sequential(
        nn.Linear(params.get("inputs", 16), 32),
        nn.ReLU(),
        nn.Dropout(params.get("dropout", 0.0)),
        nn.Linear(32, 4),
    )
    if params.get("frozen"):
        model[0].requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(trainable, lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=params.get("batch_size", 16),
        shards=params.get("shards", 2),
        warm_start=params.get("warm_start"),
        optimizer_on=params.get("optimizer_on", "device"),
    )


def wide(params: dict[str, Any]) -> Recipe:
    """A net of some million parameters, so that few states fit into the least budget."""
    width = params["width"]
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(5)]
    dropout = nn.Dropout(params["dropout"])
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), *hidden, dropout, nn.Linear(width, 4))
    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=32,
        shards=2,
    )


def long_skips(params: dict[str, Any]) -> Recipe:
    """Dropout, BatchNorm, long skips, clipping, accumulation and an LR schedule together."""
    model = LongSkips(width=8, blocks=4, classes=10)

    def schedule(optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=params["lr"], total_steps=2 * steps_per_epoch
        )

    return Recipe(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=16,
        shards=params["shards"],
        lr_scheduler=schedule,
        clip_grad_norm=0.5,
        accumulate=params.get("accumulate", 1),
    )


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token from those before it."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1))


def counting(loss: Callable[[int, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss that is told which of its calls it is.

    A queue counts, because what a loss holds may not change in training, and nobody reads queues.
    """
    calls: queue.SimpleQueue[None] = queue.SimpleQueue()

    def counted(outputs: Tensor, labels: Tensor) -> Tensor:
        calls.put(None)
        return loss(calls.qsize(), outputs, labels)

    return counted


def quarrelsome(params: dict[str, Any]) -> Recipe:
    """Trials that fail in the way that `params["fault"]` names, while they train."""
    recipe = feed_forward({"lr": 0.01})
    plain, fault = recipe.loss, params["fault"]

    def loss(seen: int, outputs: Tensor, labels: Tensor) -> Tensor:
        # Admission computes a few losses too; only a longer life is training.
        if seen > 20 and fault == "raises":
            raise RuntimeError("this loss has had enough")
        if seen > 20 and fault == "nan":
            return plain(outputs, labels) * float("nan")
        if seen == 2:
            print("hello from the loss")
            logging.getLogger("mine").warning("a warning from the loss")
        return plain(outputs, labels)

    return replace(recipe, loss=counting(loss))
