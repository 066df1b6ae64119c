"""Defines what training means here: one model, one process, plain PyTorch, no shards.

Everything else that trains is held against this file, bit for bit: admission compares the first
steps of every cut with it, the suite of models whole sub-epochs, and replay whole trials.

What each partition measures is collected in a form that can be merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.errors import ConfigurationError, NonFiniteLoss
from cerebro_hydra.recipe.attributes import kept_attributes
from cerebro_hydra.recipe.grad_scaling import take_step
from cerebro_hydra.recipe.lr_schedule import schedulers_of
from cerebro_hydra.recipe.objective.metrics import Metric, SumOverRows, merge_metrics
from cerebro_hydra.recipe.optimizer_list import kept_of
from cerebro_hydra.recipe.own_step import run_own_step
from cerebro_hydra.recipe.placement import copy_model
from cerebro_hydra.recipe.randomness import (
    FORWARD,
    RandomKey,
    forget_joined_operations,
    unit_hooks,
)
from cerebro_hydra.recipe.recipe import Recipe


class BatchTensors(Protocol):
    """Holds the rows of one batch; every tensor has them as its first dimension.

    `labels` ends with the weight of each row, if the recipe's columns have one.
    """

    @property
    def features(self) -> tuple[Tensor, ...]: ...
    @property
    def labels(self) -> tuple[Tensor, ...]: ...
    @property
    def rows(self) -> int: ...


Window = Sequence[BatchTensors]
"""The batches of one optimizer step."""

W = TypeVar("W", bound=Window)


FINITE_OUTPUTS = "though the model's outputs are finite"
"""Says of a loss that is NaN that neither weights nor features make it so."""


def not_finite(loss: float, step: int, microbatch: int, outputs: Any = None) -> NonFiniteLoss:
    """Return the error of a training loss that is NaN or infinite.

    Args:
        outputs: what the model gave, where it is known.
    """
    where = f"the loss is {loss} at step {step}, batch {microbatch} of its window"
    if math.isnan(loss) and _all_finite(outputs):
        return NonFiniteLoss(
            f"{where}, {FINITE_OUTPUTS}; look at the labels of this batch, as a mean over labels "
            "that are all ignored is nan, and at the loss function"
        )
    return NonFiniteLoss(f"{where}; try a lower learning rate or clip_grad_norm")


def _all_finite(outputs: Any) -> bool:
    """Return whether a model's outputs have numbers, and all of them are finite.

    A scalar is left out, as the loss that a model computes by itself.
    """
    tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.dim()]
    return bool(tensors) and all(bool(each.isfinite().all()) for each in tensors)


class PlainTrainer:
    """Trains and evaluates a recipe's own model with its own optimizer.

    Attributes:
        ema: the moving average of the model, or None if the recipe keeps none.
        scheduler: the LR scheduler, or None.
        scaling: what scales the losses, or None.
        steps: the number of optimizer steps that the trial has done, those that were skipped, too.
        phase: what the trainer is doing, in words, for whoever reports an error.

    Args:
        trial_seed: what the trial's random numbers depend on, beside step, microbatch and unit.
        steps_per_epoch: for LR schedules that ask.
        first_step: the number of steps that the trial has done before.
        scaler: the state of its GradScaler after them, None for one that has not been used.
    """

    def __init__(
        self,
        recipe: Recipe,
        trial_seed: int,
        steps_per_epoch: int,
        first_step: int = 0,
        scaler: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe = recipe
        self.phase = "start"
        forget_joined_operations()
        self._trial_seed = trial_seed
        self.steps = first_step
        self.scheduler = recipe.lr_schedule.make(recipe.optimizer, steps_per_epoch)
        self.scaling = recipe.scaling(scaler)
        self.ema: AveragedModel | None = None
        if recipe.ema is not None:
            # It would deep-copy the model itself, which leaves hooks on the original.
            self.ema = AveragedModel(nn.Module(), multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
            self.ema.module = copy_model(recipe.model)
            self.ema.n_averaged.fill_(first_step)

    @property
    def updates(self) -> int:
        """Return the number of optimizer steps that were not skipped."""
        return self.steps - (0 if self.scaling is None else self.scaling.skipped)

    def train(
        self, windows: Iterable[Window], epoch_metrics: Mapping[str, float] | None = None
    ) -> SumOverRows:
        """Train over a sub-epoch; return its loss.

        Args:
            epoch_metrics: what the epoch before measured, if this sub-epoch begins another one: an
                LR schedule may step on it.
        """
        total, rows = 0.0, 0
        for window, losses in self.steps_over(windows, epoch_metrics):
            for batch, loss in zip(window, losses, strict=True):
                total, rows = total + loss * batch.rows, rows + batch.rows
        return total, rows

    def steps_over(
        self, windows: Iterable[W], epoch_metrics: Mapping[str, float] | None = None
    ) -> Iterator[tuple[W, list[float]]]:
        """Train over a sub-epoch; yield each window with the mean loss of each of its batches."""
        if epoch_metrics is not None:
            self.recipe.lr_schedule.begin_epoch(self.scheduler, epoch_metrics)
        for window in windows:
            yield window, self.step(window)

    def step(self, window: Window) -> list[float]:
        """Take one optimizer step; return the mean loss of each batch of its window.

        A recipe's own training step takes it, where there is one. Else the
        gradient is that of the mean loss over all rows of the window, whatever its batches. A
        step that a GradScaler skips does not step the LR schedule either; a moving average, with
        which buffers go, moves in each step.

        Raises:
            NonFiniteLoss: a loss is NaN or infinite, or the gradients are at every scale.
            ConfigurationError: a loss depends on no trainable parameter.
        """
        if self.recipe.training_step is not None:
            return [self._own_step(*window)]
        recipe, model, scaling = self.recipe, self.recipe.model, self.scaling
        model.train()  # what it returns is not asked for, as some return nothing
        rows = sum(batch.rows for batch in window)
        losses = []
        model.zero_grad()
        for microbatch, batch in enumerate(window):
            key = RandomKey(self._trial_seed, self.steps, microbatch, recipe.device)
            # A checkpoint runs units again in backward.
            with recipe.compiled(model), unit_hooks(model, key.reseed):
                loss, outputs = self._loss(batch, key)
                losses.append(loss.item())
                if not math.isfinite(losses[-1]):
                    raise not_finite(losses[-1], self.steps, microbatch, outputs)
                del outputs  # as large as an activation, and backward does not need it
                if len(window) > 1:
                    loss = loss * (batch.rows / rows)
                if scaling is not None:
                    loss = scaling.scale(loss)
                self.phase = "backward"
                loss.backward()
        self.phase = "clipping"
        if scaling is not None:
            scaling.unscale(recipe.optimizer)
        if recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
        if recipe.clip_grad_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), recipe.clip_grad_value)
        self.phase = "optimizer step"
        if take_step(recipe.optimizer, scaling, self.steps, recipe.optimizer_on == "host"):
            recipe.lr_schedule.after_step(self.scheduler)
        if self.ema is not None:
            self.ema.update_parameters(model)
        self.steps += 1
        return losses

    def _own_step(self, batch: BatchTensors) -> float:
        """Let the user's step train on a batch; it begins with no gradients, as after a hop."""
        recipe = self.recipe
        recipe.model.zero_grad()
        loss = self.run_own_step(batch)
        if not math.isfinite(loss):
            raise not_finite(loss, self.steps, 0)
        recipe.lr_schedule.after_step(self.scheduler)
        if self.ema is not None:
            self.ema.update_parameters(recipe.model)
        self.steps += 1
        return loss

    def run_own_step(self, batch: BatchTensors) -> float:
        """Run the user's step, and return its loss; random numbers restart for collate and for it.

        Nothing else of a step is done.
        """
        recipe = self.recipe
        assert recipe.training_step is not None
        key = RandomKey(self._trial_seed, self.steps, 0, recipe.device)
        self.phase = "collate"
        features, targets = recipe.collated(batch.features, batch.labels, key)
        self.phase = "training step"
        key.reseed(FORWARD)
        named, schedulers = recipe.named(features, targets), schedulers_of(self.scheduler)
        (model := recipe.model).train()
        with recipe.compiled(model), torch.jit.optimized_execution(False):
            return run_own_step(recipe.training_step, model, recipe.optimizer, schedulers, named)

    def _loss(self, batch: BatchTensors, key: RandomKey) -> tuple[Tensor, Any]:
        """Compute a loss, and return it with the model's outputs.

        Random numbers restart for collate, the forward and every unit call.
        """
        recipe = self.recipe
        self.phase = "collate"
        features, targets = recipe.collated(batch.features, batch.labels, key)
        with recipe.precision():
            self.phase = "forward"
            outputs = recipe.call(recipe.model, recipe.inputs(features, targets))
            self.phase = "loss"
            loss = recipe.compute_loss(outputs, targets)
        if not loss.requires_grad:
            raise ConfigurationError(
                "the loss depends on no trainable parameter; set requires_grad on some"
            )
        return loss, outputs

    def evaluate(
        self,
        batches: Iterable[BatchTensors],
        on_outputs: Callable[[Any], object] | None = None,
    ) -> Evaluation:
        """Measure one partition's validation rows; the trial stays as it is.

        Args:
            on_outputs: called with what the model gives for each batch.

        Raises:
            NonFiniteLoss: a loss is NaN or infinite.
        """
        recipe, model = self.recipe, self.evaluated_model()
        buffers: dict[str, Any] = {}
        evaluation = RunningEvaluation(recipe)
        with kept_attributes(model), recipe.compiled(model):
            model.eval()
            for batch in batches:
                self.phase = "collate in evaluation"
                features, targets = recipe.collated(batch.features, batch.labels, None)
                with torch.no_grad(), recipe.precision():
                    self.phase = "forward in evaluation"
                    outputs = recipe.call.evaluate(model, recipe.inputs(features, targets), buffers)
                    if on_outputs is not None:
                        on_outputs(outputs)
                    self.phase = "loss in evaluation"
                    loss = recipe.compute_loss(outputs, targets).item()
                    self.phase = "metrics"
                    evaluation.add(loss, outputs, targets, batch.rows)
        return evaluation.result()

    def evaluated_model(self) -> nn.Module:
        """Return the model that is evaluated and kept: the moving average, if there is one."""
        return self.recipe.model if self.ema is None else self.ema.module

    def tensors(self) -> dict[str, Tensor]:
        """Return the live state, named as a checkpoint names it."""
        found = state_tensors(self.recipe)
        if self.ema is not None:
            averages = self.ema.module.named_parameters()
            found |= {f"ema:{name}": p.detach() for name, p in averages if p.requires_grad}
        return found


def state_tensors(recipe: Recipe) -> dict[str, Tensor]:
    """Return parameters, buffers and optimizer state, named as a checkpoint names them."""
    model = recipe.model
    found = {f"param:{name}": p.detach() for name, p in model.named_parameters()}
    found |= {f"buffer:{name}": buffer for name, buffer in model.named_buffers()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # Adagrad makes state for whatever it is given
            found |= kept_of(name, recipe.optimizer.state.get(parameter, {}))
    return found


@dataclass(frozen=True)
class Evaluation:
    """Holds what the validation rows of one partition gave.

    `sums` has the loss and every averaged metric, `states` those metrics that keep a state.
    """

    sums: dict[str, SumOverRows]
    states: dict[str, Any]


@dataclass
class RunningEvaluation:
    """Sums up the batches of one partition that were evaluated so far."""

    recipe: Recipe
    batches: int = 0
    sums: dict[str, SumOverRows] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)

    def add(self, loss: float, outputs: Any, targets: Sequence[Tensor], rows: int) -> None:
        """Add a batch with its mean loss, and measure its metrics.

        Raises:
            NonFiniteLoss: the loss is NaN or infinite.
        """
        measured = {"loss": (loss * rows, rows)}
        measured |= self.recipe.compute_metrics(outputs, targets, rows)
        self.recipe.update_states(self.states, outputs, targets)
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the validation loss of batch {self.batches} is {loss}")
        for name, (value, count) in measured.items():
            total, counted = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + value, counted + count)
        self.batches += 1

    def result(self) -> Evaluation:
        """Return what all batches gave."""
        return Evaluation(self.sums, self.states)


def mean(sums: Iterable[SumOverRows]) -> float:
    """Merge sums over rows, in float64 and in the order given; the mean of nothing is NaN."""
    total, count = 0.0, 0
    for value, rows in sums:
        total, count = total + value, count + rows
    return total / count if count else math.nan


def merge_evaluations(
    state_metrics: Sequence[Metric], parts: Sequence[Evaluation]
) -> dict[str, float]:
    """Merge what all partitions gave, in partition order, into one value per measured name."""
    names = dict.fromkeys(name for part in parts for name in part.sums)
    merged = {name: mean(p.sums[name] for p in parts if name in p.sums) for name in names}
    if parts:
        merged |= merge_metrics(state_metrics, [part.states for part in parts])
    return merged
