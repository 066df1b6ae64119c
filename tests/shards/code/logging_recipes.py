"""Recipes of the kinds that users write, whose code counts, times and warns for a log."""

from __future__ import annotations

import collections
import functools
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Columns, Recipe

LARGE = 2.0
"""Rows with a larger value come late."""

log = logging.getLogger(__name__)


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)


class Counts(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:
            log.debug("call %d", self.calls)
        return super().forward(x)


class Warns(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.warned = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.warned and x.max() > LARGE:
            warnings.warn("large values", stacklevel=2)
            self.warned = True
        return super().forward(x)


class WarnsAnew(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > LARGE and not hasattr(self, "shown"):
            self.shown = True
            log.info("rows of %s", tuple(x.shape))
        return super().forward(x)


class Times(Layer):
    def forward(self, x: Tensor) -> Tensor:
        begun = time.perf_counter()
        y = super().forward(x)
        self.seconds = time.perf_counter() - begun
        return y


class Gathers(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.rows: dict[str, int] = collections.Counter()
        self.average, self.largest = 0.0, 0.0
        self.usage = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.norms.append(x.detach().norm().item())
        self.rows["all"] += len(x)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean().item()
        self.largest = max(self.largest, x.detach().max().item())
        self.usage += x.detach().sum(0)
        return super().forward(x)


class OfAllLayers(Layer):
    total = 0

    def forward(self, x: Tensor) -> Tensor:
        OfAllLayers.total += len(x)
        return super().forward(x)


class Best(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.best = math.inf

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        if loss.item() < self.best:
            self.best = loss.item()
        return loss


SEEN: list[float] = []


def gathered(outputs: Tensor, labels: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(outputs, labels)
    SEEN.append(loss.item())
    if len(SEEN) % 4 == 0:
        print("mean loss", sum(SEEN[-4:]) / 4)
    return loss


WARNED = False


def flagging(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    global WARNED
    if batch["x"].max() > LARGE and not WARNED:
        WARNED = True
        log.info("large values")
    return batch


@functools.lru_cache(None)
def warn_once(message: str) -> None:
    log.warning(message)


def warns(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    if batch["x"].max() > LARGE:
        warn_once("large values")
    return batch


def counting() -> Callable[..., dict[str, Tensor]]:
    rows, numbers = 0, itertools.count()
    labels: dict[int, int] = collections.Counter()

    def collate(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        nonlocal rows
        rows += len(batch["x"])
        labels.update(batch["y"].tolist())
        log.debug("batch %d, row %d", next(numbers), rows)
        return batch

    return collate


class LogsSteps(torch.optim.AdamW):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        if self.steps % 3 == 0:
            log.info("step %d", self.steps)
        super().step(closure)


def hooked() -> nn.Module:
    layer, seen, calls = Layer(), {}, [0]

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        calls[0] += 1
        seen["mean"] = output.detach().mean().item()
        if calls[0] % 3 == 0:
            log.info("%d calls", calls[0])

    layer.register_forward_hook(hook)
    return layer


def made(
    middle: Callable[[], nn.Module] = Layer,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    loss: Callable[[], Any] = nn.CrossEntropyLoss,
    collate: Callable[[], Any] | None = None,
    shards: int = 2,
) -> Recipe:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), middle(), nn.Tanh(), nn.Linear(6, 3))
    return Recipe(
        model, optimizer(model.parameters(), lr=0.05), loss(), shards=shards,
        collate=collate and collate(),
    ).bind(Columns(("x",), ("y",)))  # fmt: skip


RECIPES: dict[str, dict[str, Any]] = {
    "a layer that counts": {"middle": Counts},
    "one that warns once": {"middle": lambda: nn.Sequential(Warns(), Warns())},
    "one that is told once": {"middle": WarnsAnew},
    "one that is timed": {"middle": Times},
    "one that gathers statistics": {"middle": Gathers},
    "one whose class counts": {"middle": OfAllLayers},
    "one with a hook": {"middle": hooked},
    "a loss that knows the best": {"loss": Best},
    "a loss that gathers": {"loss": lambda: gathered},
    "a collate with a flag": {"collate": lambda: flagging},
    "a collate that warns by a cache": {"collate": lambda: warns},
    "a collate that counts": {"collate": counting},
    "an optimizer that counts": {"optimizer": LogsSteps},
}
