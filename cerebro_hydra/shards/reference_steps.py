"""A few plain, uncut training steps: what admission holds a cut against."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, RandomKey, Recipe
from cerebro_hydra.shards.optimizer_clone import clone_optimizer
from cerebro_hydra.shards.reseed import enter_unit, random_key, unit_hooks
from cerebro_hydra.shards.sample import Example, copy_example

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
        recipe, columns = self._recipe, self._recipe.columns
        self.model.zero_grad(set_to_none=True)
        losses = []
        with unit_hooks(self.model, enter_unit):
            for number in range(microbatches):
                key = RandomKey(self._seed, self._step, number)
                features, targets = _attempt(
                    "collate", columns, batch, recipe.collated, *copy_example(batch), key
                )
                inputs = recipe.inputs(features, targets)
                with random_key(key), recipe.precision():
                    outputs = _attempt("forward", columns, batch, recipe.call, self.model, inputs)
                    loss = _attempt("loss", columns, batch, recipe.compute_loss, outputs, targets)
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
                _attempt("backward", columns, batch, loss.backward)
        if recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_grad_norm)
        if recipe.clip_grad_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), recipe.clip_grad_value)
        _attempt("optimizer step", columns, batch, self.optimizer.step)
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
        columns = recipe.columns
        model = (self.model if self.ema is None else self.ema.module).eval()
        given = _attempt(
            "collate in evaluation", columns, batch, recipe.collated, *copy_example(batch), None
        )
        features, targets = given
        inputs = recipe.inputs(features, targets)
        # Evaluation has no key, so what draws there must be seen to differ in shards.
        RandomKey(self._seed, self._step, 0).reseed("evaluation")
        with torch.no_grad(), recipe.precision():
            evaluate = recipe.call.evaluate
            outputs = _attempt("forward in evaluation", columns, batch, evaluate, model, inputs, {})
            loss = _attempt(
                "loss in evaluation", columns, batch, recipe.compute_loss, outputs, targets
            )
            measured = _attempt("metrics", columns, batch, recipe.compute_metrics, outputs, targets)
            _attempt("metrics", columns, batch, recipe.update_states, states, outputs, targets)
        model.train()
        return Evaluated(batch, outputs, {"loss": loss.item(), **measured}, states)


_REMEDIES = {
    "forward": "; give the model inputs of that shape, or reshape the columns with collate",
    "loss": "; give the model outputs that fit these labels, or a loss that fits both",
}


def _attempt(
    what: str, columns: Columns | None, batch: Example, function: Callable[..., T], *arguments: Any
) -> T:
    try:
        return function(*arguments)
    except ConfigurationError:
        raise
    except Exception as error:
        features, labels = (None, None) if columns is None else (columns.features, columns.targets)
        remedy = _REMEDIES.get(what, "")
        raise ConfigurationError(
            f"the {what} failed on a batch with features ({_forms(batch[0], features)}) and "
            f"labels ({_forms(batch[1], labels)}): {type(error).__name__}: {error}{remedy}"
        ) from error


def _forms(tensors: Sequence[Tensor], names: Sequence[str] | None) -> str:
    """Such as `tokens: int64[32, 128] from 0 to 20411`."""
    forms = []
    for number, tensor in enumerate(tensors):
        form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        if not tensor.is_floating_point() and tensor.numel():
            form += f" from {tensor.min().item()} to {tensor.max().item()}"
        forms.append(form if names is None else f"{names[number]}: {form}")
    return ", ".join(forms)
