"""What a user's `estimator_gen_fn` returns: one configuration to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import MetricFunction, Recipe


class SparkEstimator:
    """A model with everything that its training needs.

    Args:
        model: its forward takes one positional tensor per feature column, rows first.
        optimizer: an instance over the model's parameters, such as
            `torch.optim.AdamW(model.parameters())`.
        loss: `loss(outputs, *labels)` gives the mean over the rows of a batch, a scalar.
        metrics: names, or `{name: (function, "min"|"max")}`.
        batch_size: rows per batch.
        shards: how many to cut the model into, or the names of the modules to cut at.
        lr_scheduler: a function of the optimizer, or of (optimizer, steps_per_epoch).
        clip_grad_norm: largest global 2-norm of the gradients, or None.
        accumulate: batches per optimizer step.

    Raises:
        ConfigurationError: an argument can't be used; the message names it and its value.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Tensor],
        metrics: Sequence[str] | Mapping[str, tuple[MetricFunction, str]] = (),
        batch_size: int = 32,
        shards: int | Sequence[str] = 1,
        lr_scheduler: Callable[..., Any] | None = None,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
    ) -> None:
        self._recipe = Recipe(
            model=model,
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            batch_size=batch_size,
            shards=shards,
            lr_scheduler=lr_scheduler,
            clip_grad_norm=clip_grad_norm,
            accumulate=accumulate,
        )

    @property
    def recipe(self) -> Recipe:
        """The same as data: what agents and the replay read."""
        return self._recipe
