"""Plain training of a recipe, and what it leaves behind as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import PlainTrainer, Recipe, state_tensors

TRIAL_SEED = 11


def train(
    recipe: Recipe, sub_epochs: Sequence[Sequence[list[Batch]]], steps_per_epoch: int = 4
) -> tuple[list[float], PlainTrainer]:
    """Train the recipe's own model; return the loss sum over rows of each sub-epoch."""
    trainer = PlainTrainer(recipe, TRIAL_SEED, steps_per_epoch)
    return [trainer.train(windows)[0] for windows in sub_epochs], trainer


def bits(tensor: torch.Tensor) -> tuple:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def everything(recipe: Recipe) -> dict[str, tuple]:
    """Return every parameter, buffer and optimizer state by name, as bytes."""
    return {n: bits(t) for n, t in state_tensors(recipe).items()}
