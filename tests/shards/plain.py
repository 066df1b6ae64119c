"""Plain training of a recipe, and what it leaves behind as bytes."""

from __future__ import annotations

import torch

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.testing.plain_training import PlainTraining, Rows, Window, tensors_of

__all__ = ["TRIAL_SEED", "Rows", "bits", "everything", "train"]

TRIAL_SEED = 11


def train(
    recipe: Recipe, sub_epochs: list[list[Window]], steps_per_epoch: int = 4
) -> tuple[list[float], PlainTraining]:
    """Train the recipe's own model; gives the loss sum over rows of each sub-epoch."""
    training = PlainTraining(recipe, TRIAL_SEED, steps_per_epoch)
    sums = []
    for windows in sub_epochs:
        rows = [batch.rows for window in windows for batch in window]
        total = 0.0
        for count, loss in zip(rows, training.train(windows), strict=True):
            total += loss * count
        sums.append(total)
    return sums, training


def bits(tensor: torch.Tensor) -> tuple:
    flat = tensor.detach().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def everything(recipe: Recipe) -> dict[str, tuple]:
    """Every parameter, buffer and optimizer state by name, as bytes."""
    return {n: bits(t) for n, t in tensors_of(recipe).items()}
