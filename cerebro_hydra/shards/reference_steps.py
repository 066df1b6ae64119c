"""A few plain, uncut training steps: what admission holds a cut against."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import RandomKey, Recipe
from cerebro_hydra.shards.optimizer_clone import clone_optimizer
from cerebro_hydra.shards.reseed import enter_unit, random_key, unit_hooks
from cerebro_hydra.shards.sample import Example, fresh

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluated:
    """A batch in evaluation: outputs, loss and averaged metrics, states of custom metrics."""

    batch: Example
    outputs: Any
    averages: dict[str, float]
    states: dict[str, Any]


class ReferenceSteps:
    """Plain training of a copy of a recipe, one window of equal batches per step."""

    def __init__(self, recipe: Recipe, trial_seed: int, steps_per_epoch: int) -> None:
        self.model = copy.deepcopy(recipe.model).train()
        pairs = zip(recipe.model.parameters(), self.model.parameters(), strict=True)
        mapping = {id(original): twin for original, twin in pairs}
        self.optimizer = clone_optimizer(recipe.optimizer, mapping)
        self.scheduler = recipe.lr_schedule.make(self.optimizer, steps_per_epoch)
        self.ema = (
            None
            if recipe.ema is None
            else AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
        )
        self._recipe = recipe
        self._seed = trial_seed
        self._step = 0

    def step(self, batch: Example, microbatches: int) -> list[float]:
        """One optimizer step over a batch, taken `microbatches` times; gives its losses.

        Raises:
            ConfigurationError: the user's model, loss or optimizer fails on this batch.
        """
        recipe = self._recipe
        self.model.zero_grad(set_to_none=True)
        losses = []
        with unit_hooks(self.model, enter_unit):
            for number in range(microbatches):
                key = RandomKey(self._seed, self._step, number)
                features, targets = _attempt("collate", batch, recipe.collated, *fresh(batch), key)
                inputs = recipe.inputs(features, targets)
                with random_key(key), recipe.precision():
                    outputs = _attempt("forward", batch, recipe.call, self.model, inputs)
                    loss = _attempt("loss", batch, recipe.compute_loss, outputs, targets)
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
        if recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_grad_norm)
        if recipe.clip_grad_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), recipe.clip_grad_value)
        _attempt("optimizer step", batch, self.optimizer.step)
        recipe.lr_schedule.after_step(self.scheduler)
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self._step += 1
        return losses

    def evaluate(self, batch: Example) -> Evaluated:
        """What evaluation gives on a batch.

        Raises:
            ConfigurationError: the user's model, loss or a metric fails on this batch.
        """
        recipe, states = self._recipe, dict[str, Any]()
        model = (self.model if self.ema is None else self.ema.module).eval()
        given = _attempt("collate in evaluation", batch, recipe.collated, *fresh(batch), None)
        features, targets = given
        inputs = recipe.inputs(features, targets)
        # Evaluation has no key, so what draws there must be seen to differ in shards.
        RandomKey(self._seed, self._step, 0).reseed("evaluation")
        with torch.no_grad(), recipe.precision():
            evaluate = recipe.call.evaluate
            outputs = _attempt("forward in evaluation", batch, evaluate, model, inputs, {})
            loss = _attempt("loss in evaluation", batch, recipe.compute_loss, outputs, targets)
            measured = _attempt("metrics", batch, recipe.compute_metrics, outputs, targets)
            _attempt("metrics", batch, recipe.update_states, states, outputs, targets)
        model.train()
        return Evaluated(batch, outputs, {"loss": loss.item(), **measured}, states)


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
