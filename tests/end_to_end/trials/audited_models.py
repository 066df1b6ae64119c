"""Factories of trials that train otherwise than their uncut model, after admission."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.engine import graph_tasks, sub_epoch
from integration.zoo.of_rare_events import ClipsLate
from tests.end_to_end.models import feed_forward

FIRST_WRONG = 40
"""The step, or the forward, from which on a fault shows: behind those of admission."""


DRAWN = torch.randn(4)  # without a seed: other numbers in each process that imports this


class Shifts(nn.Module):
    """Adds what its module has drawn."""

    def forward(self, x: Tensor) -> Tensor:
        return x + DRAWN


class Counts(nn.Module):
    """Counts its forwards in training, and gives something else after some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = lru_cache(maxsize=None)(abs)  # nobody sees what a cache holds

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        number = self.calls.cache_info().currsize
        self.calls(number)
        return x * 1.5 if number >= FIRST_WRONG else x


class Dampens(nn.Module):
    """Changes an attribute from a step on that a buffer counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
            self.gain *= 0.99 if self.steps > FIRST_WRONG else 1.0
        return x * self.gain


class InEvaluation(nn.Module):
    """Changes its buffer, weight or attribute in evaluation, after some steps that it counts."""

    def __init__(self, changed: str) -> None:
        super().__init__()
        self.changed = changed
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("buffer", torch.zeros(()))
        self.weight = nn.Parameter(torch.ones(()))
        self.attribute = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        elif self.steps > FIRST_WRONG:
            if self.changed == "buffer":
                self.buffer += 0.01
            if self.changed == "weight":
                self.weight.data.mul_(0.99)
            if self.changed == "attribute":
                self.attribute += 0.01
        return x * (self.weight + self.buffer + self.attribute)


class ReadsLate(nn.Module):
    """Reads the weights of its last layer before all layers, after some steps that it counts."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        if self.steps > FIRST_WRONG:
            x = x + self.layers[-1].weight.detach().mean()
        return self.layers(x)


def penalized(model: nn.Module) -> Any:
    """Return a loss that reads all weights in evaluation, once it is low."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(outputs, labels)
        if torch.is_grad_enabled() or found > 1.2:
            return found
        return found + 0.01 * sum(each.square().sum() for each in model.parameters())

    return loss


class HalvesLate:
    """A metric that is halved after some batches."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return (outputs.argmax(1) == labels).float().mean() * (1 if self.calls < 20 else 0.5)


class Scales(nn.Module):
    """A loss with a buffer that moves once the loss is low."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        if loss < 0.95:
            self.scale *= 0.999
        return loss * self.scale


class ClipsLarge(torch.optim.AdamW):
    """Clips by the global norm, which is seldom large."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        nn.utils.clip_grad_norm_(group["params"], 2.0)
        super().step(closure)


class ClipsAfterSome(ClipsLate):
    freely, most = FIRST_WRONG, 0.01


_update = sub_epoch.SubEpoch.update


def _wrong_update(self: Any, k: int) -> None:
    """Update as the engine does, and then flip the last bit of a weight of a marked model."""
    _update(self, k)
    self._marks.pop(k, None)  # else it is found as what the trial's code writes
    self._samples.pop(k, None)
    if self.step >= FIRST_WRONG and getattr(self._recipe.model, "marked", False):
        for parameter in self._states[k].params.values():
            parameter.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1)


_forward = graph_tasks.GraphTasks.forward


def _wrong_forward(self: Any, k: int, going: graph_tasks.GraphPass) -> None:
    """Run a shard's graph, and then let another value go on to the next shard."""
    _forward(self, k, going)
    if going.batch.key.step >= FIRST_WRONG:
        going.values |= {name: value * 1.001 for name, value in going.values.items()}


def faulty(params: dict[str, Any]) -> Recipe:
    """A small net with dropout.

    Its `fault` is "none", "in shards", "in graphs", "counts", "attribute", "loss", "clips large",
    "clips late", "metric", "draws", "reads late", "penalizes late", or "evaluation" and what that
    changes.
    """
    recipe = feed_forward({"lr": 0.01, "dropout": 0.2, "batch_size": 4})
    if params["fault"] == "counts":
        recipe.model[1] = nn.Sequential(nn.ReLU(), Counts())
    if params["fault"].startswith("evaluation "):
        changed = params["fault"].removeprefix("evaluation ")
        recipe.model[1] = nn.Sequential(nn.ReLU(), InEvaluation(changed))
    if params["fault"] == "metric":
        recipe = replace(recipe, metrics={"accuracy": (HalvesLate(), "max")})
    if params["fault"] == "reads late":
        recipe = replace(recipe, model=ReadsLate(recipe.model))
    if params["fault"] == "draws":
        recipe.model.append(Shifts())
    if params["fault"] == "penalizes late":
        recipe = replace(recipe, loss=penalized(recipe.model))
    if params["fault"] == "attribute":
        recipe.model[1] = nn.Sequential(nn.ReLU(), Dampens())
    if params["fault"] == "loss":
        recipe = replace(recipe, loss=Scales())
    if params["fault"].startswith("clips"):
        kind = ClipsAfterSome if params["fault"] == "clips late" else ClipsLarge
        recipe.optimizer = kind(recipe.model.parameters(), lr=0.01)
    if params["fault"] == "in shards" and os.getpid() != params["driver"]:
        recipe.model.marked = True
        sub_epoch.SubEpoch.update = _wrong_update  # type: ignore[method-assign]
    if params["fault"] == "in graphs":
        recipe.cut = "export"
        if os.getpid() != params["driver"]:
            graph_tasks.GraphTasks.forward = _wrong_forward  # type: ignore[method-assign]
    return recipe
