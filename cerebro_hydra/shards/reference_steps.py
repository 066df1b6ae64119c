"""A few plain, uncut training steps: what admission holds a cut against."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.optimizer_clone import clone_optimizer
from cerebro_hydra.shards.reseed import enter_unit, random_key, unit_hooks

Example = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
T = TypeVar("T")


class ReferenceSteps:
    """Plain training of a copy of a recipe, one window of equal batches per step."""

    def __init__(self, recipe: Recipe, trial_seed: int, steps_per_epoch: int) -> None:
        self.model = copy.deepcopy(recipe.model).train()
        pairs = zip(recipe.model.parameters(), self.model.parameters(), strict=True)
        mapping = {id(original): twin for original, twin in pairs}
        self.optimizer = clone_optimizer(recipe.optimizer, mapping)
        self.scheduler = recipe.make_scheduler(self.optimizer, steps_per_epoch)
        self._recipe = recipe
        self._seed = trial_seed
        self._step = 0

    def step(self, batch: Example, microbatches: int) -> list[float]:
        """One optimizer step over a batch, taken `microbatches` times; gives its losses.

        Raises:
            ConfigurationError: the user's model, loss or optimizer fails on this batch.
        """
        features, labels = batch
        self.model.zero_grad(set_to_none=True)
        losses = []
        with unit_hooks(self.model, enter_unit):
            for number in range(microbatches):
                with random_key(RandomKey(self._seed, self._step, number)):
                    outputs = _attempt("forward", batch, self.model, *fresh(features))
                    loss = _attempt(
                        "loss", batch, self._recipe.compute_loss, outputs, fresh(labels)
                    )
                losses.append(loss.item())
                if not math.isfinite(losses[-1]):
                    raise ConfigurationError(
                        f"the loss of the first rows is {losses[-1]}; check the data, the loss "
                        "function and the learning rate"
                    )
                if not loss.requires_grad:
                    raise ConfigurationError(
                        "the loss depends on no trainable parameter; set requires_grad on some"
                    )
                if microbatches > 1:
                    loss = loss * (1 / microbatches)
                _attempt("backward", batch, loss.backward)
        if self._recipe.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._recipe.clip_grad_norm)
        _attempt("optimizer step", batch, self.optimizer.step)
        if self.scheduler is not None:
            self.scheduler.step()
        self._step += 1
        return losses


def fresh(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies: a model may write into its batch, and admission uses a batch more than once."""
    return tuple(tensor.clone() for tensor in tensors)


def _attempt(what: str, batch: Example, function: Callable[..., T], *arguments: Any) -> T:
    try:
        return function(*arguments)
    except ConfigurationError:
        raise
    except Exception as error:
        _refuse(what, batch, error)


def _refuse(what: str, batch: Example, error: Exception) -> NoReturn:
    def forms(tensors: Sequence[Tensor]) -> str:
        each = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
        return ", ".join(each) or "none"

    raise ConfigurationError(
        f"the {what} failed on a batch with features {forms(batch[0])} and labels "
        f"{forms(batch[1])}: {type(error).__name__}: {error}"
    ) from error
