"""Training as any loop in plain PyTorch does it: what the suite of models holds shards against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cerebro_hydra.recipe import RandomKey, Recipe, units


@dataclass(frozen=True)
class Rows:
    """A batch: features and targets, rows first."""

    features: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    rows: int


Window = list[Rows]
"""The batches of one optimizer step."""


class PlainTraining:
    """Trains a recipe's own model and optimizer, uncut, in this process.

    Args:
        trial_seed: what the random numbers of units depend on, beside step, microbatch and call.
    """

    def __init__(self, recipe: Recipe, trial_seed: int, steps_per_epoch: int) -> None:
        self.recipe = recipe
        self._seed = trial_seed
        self._step = 0
        self._scheduler = recipe.lr_schedule.make(recipe.optimizer, steps_per_epoch)
        self._ema: Any = None
        if recipe.ema is not None:
            average = get_ema_multi_avg_fn(recipe.ema)
            self._ema = AveragedModel(recipe.model, multi_avg_fn=average)

    def train(self, windows: Sequence[Window]) -> list[float]:
        """Take the steps of a sub-epoch; gives the loss of every batch."""
        recipe, model = self.recipe, self.recipe.model.train()
        losses = []
        for window in windows:
            model.zero_grad(set_to_none=True)
            total = sum(batch.rows for batch in window)
            for number, batch in enumerate(window):
                key = RandomKey(self._seed, self._step, number)
                features, targets = recipe.collated(batch.features, batch.labels, key)
                with _Reseeding(model, key), recipe.precision():
                    outputs = recipe.call(model, recipe.inputs(features, targets))
                    loss = recipe.compute_loss(outputs, targets)
                losses.append(loss.item())
                (loss * (batch.rows / total) if len(window) > 1 else loss).backward()
            if recipe.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad_norm)
            if recipe.clip_grad_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), recipe.clip_grad_value)
            recipe.optimizer.step()
            recipe.lr_schedule.after_step(self._scheduler)
            if self._ema is not None:
                self._ema.update_parameters(model)
            self._step += 1
        return losses

    def evaluated(self) -> nn.Module:
        """The model that evaluation uses, in eval mode: the moving average where it is kept."""
        model: nn.Module = self.recipe.model if self._ema is None else self._ema.module
        return model.eval()

    def evaluate(self, batches: Sequence[Rows]) -> dict[str, tuple[float, int]]:
        """Loss and averaged metrics, each (sum over rows, rows)."""
        recipe, model = self.recipe, self.evaluated()
        sums: dict[str, float] = {}
        for batch in batches:
            features, targets = recipe.collated(batch.features, batch.labels, None)
            with torch.no_grad(), recipe.precision():
                outputs = recipe.call(model, recipe.inputs(features, targets))
                values = {"loss": recipe.compute_loss(outputs, targets).item()}
                values |= recipe.compute_metrics(outputs, targets)
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + value * batch.rows
        rows = sum(batch.rows for batch in batches)
        return {name: (value, rows) for name, value in sums.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter, average, buffer and optimizer state, named as segments name them."""
        found = tensors_of(self.recipe)
        if self._ema is not None:
            averages = self._ema.module.named_parameters()
            found |= {f"ema:{n}": p for n, p in averages if p.requires_grad}
        return found


def tensors_of(recipe: Recipe) -> dict[str, Tensor]:
    """Parameters, buffers and optimizer state of a recipe, named as segments name them."""
    found: dict[str, Tensor] = {f"param:{n}": p for n, p in recipe.model.named_parameters()}
    found |= {f"buffer:{n}": b for n, b in recipe.model.named_buffers()}
    for name, parameter in recipe.model.named_parameters():
        if parameter.requires_grad:
            for key, value in recipe.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[f"optim:{name}:{key}"] = value
    return found


class _Reseeding:
    """Within it, one forward restarts its random numbers at its begin and at every unit call."""

    def __init__(self, model: nn.Module, key: RandomKey) -> None:
        self._model = model
        self._key = key
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._key.reseed("")
        calls: Counter[str] = Counter()

        def entering(name: str) -> Callable[[nn.Module, Any], None]:
            def hook(module: nn.Module, arguments: Any) -> None:
                self._key.reseed(f"{name}@{calls[name]}")
                calls[name] += 1

            return hook

        for name in units(self._model):
            module = self._model.get_submodule(name)
            self._handles.append(module.register_forward_pre_hook(entering(name)))

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
