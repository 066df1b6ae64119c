"""Factories of trials whose code writes to a layer when its shard is done, or at any time."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe
from tests.end_to_end.models import feed_forward

FIRST_LATE = 12
"""The forward in training from which on "later" writes: behind those of admission."""


class Counted(nn.Linear):
    """Counts its steps in a buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(x)


class Shifted(nn.Linear):
    """Adds a buffer to what it gives, which grows with each step."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.shift += 0.001
        return super().forward(x) + self.shift


class Scribbler:
    """Writes to a buffer from a thread of its own, into the memory that training had for it."""

    def __init__(self) -> None:
        self._memory: Any = None

    def __call__(self, layer: Shifted) -> None:
        begins, self._memory = self._memory is None, layer.shift.detach().numpy()
        if begins:
            threading.Thread(target=_scribble, args=(weakref.ref(self),), daemon=True).start()

    def write(self) -> None:
        self._memory += 1


def _scribble(scribbler: weakref.ref[Scribbler]) -> None:
    pause = threading.Event()
    while (found := scribbler()) is not None:
        found.write()
        del found
        pause.wait(0.001)


def hooked(params: dict[str, Any]) -> Recipe:
    """A small net with dropout, whose first layer has a backward hook.

    Its `writes` is "never"; "always" or "later", which is to a buffer of the last layer; or "from a
    thread", which begins to do so on an agent.
    """
    recipe = feed_forward({"lr": 0.01, "dropout": 0.2})
    first, last = Counted(16, 32), Shifted(32, 4)
    recipe.model[0], recipe.model[3] = first, last
    recipe.optimizer = torch.optim.AdamW(recipe.model.parameters(), lr=0.01)
    writes, scribbler = params["writes"], Scribbler()

    def hook(module: nn.Module, *_: Any) -> None:
        late = first.steps.item() >= FIRST_LATE
        if writes == "always" or (writes == "later" and late):
            last.shift += 0.01
        elif writes == "from a thread" and late:
            scribbler(last)

    first.register_full_backward_hook(hook)
    return recipe


class Observed(nn.Linear):
    """Counts outliers, and scales what it gives by an average that begins after some steps."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("outliers", torch.zeros(()))
        self.register_buffer("average", torch.ones(sizes[1]))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            self.steps += 1
            if x.detach().abs().max() > 4.2:
                self.outliers += 1
            if self.steps > 20:
                self.average.lerp_(out.detach().abs().mean(0), 0.05)
        return out / (0.5 + self.average)


class Scaled(nn.Linear):
    """Scales what it gives by a buffer to which its forward never writes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("average", torch.ones(sizes[1]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.average


def observing(params: dict[str, Any]) -> Recipe:
    """A net with small buffers that begin to move late, by its `layer` or by its `loss`."""
    by_loss = params["moved_by"] == "loss"
    first = (Scaled if by_loss else Observed)(16, 32)
    model = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Linear(32, 4))

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if labels.float().mean() > 2.2:
            first.average = first.average * 0.9  # not in place: backward needs what there was
        return nn.functional.cross_entropy(outputs, labels)

    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.005),
        loss=loss if by_loss else nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=8,
        shards=3,
        cut="export" if by_loss else "modules",
    )
