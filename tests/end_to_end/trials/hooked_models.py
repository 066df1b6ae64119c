"""Factories of trials whose code writes to a layer when its shard is away, or at any time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
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


class Multiplied(Shifted):
    """Has a scalar parameter, too."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def _to_a_buffer(layer: Multiplied) -> None:
    layer.shift.mul_(0.99)


def _to_a_scalar(layer: Multiplied) -> None:
    layer.scale.data.mul_(0.99)


def _to_an_element(layer: Multiplied) -> None:
    layer.bias.data[:1].add_(0.05)


def _by_numpy(layer: Multiplied) -> None:
    layer.bias.detach().numpy()[0] += 0.05


def _by_other_data(layer: Multiplied) -> None:
    layer.bias.data = torch.full((4,), 0.3)


WRITES: dict[str, tuple[Callable[[Multiplied], None], str]] = {
    "to a buffer": (_to_a_buffer, "buffer '3.shift'"),
    "to a scalar": (_to_a_scalar, "parameter '3.scale'"),
    "to an element": (_to_an_element, "parameter '3.bias'"),
    "by numpy": (_by_numpy, "parameter '3.bias'"),
    "by other data": (_by_other_data, "parameter '3.bias'"),
}
"""What is written, and to what."""


class Foreseeing(Counted):
    """Writes to a later layer in its forward, from the first one on or later."""

    def __init__(self, later: Multiplied, writes: str, from_the_start: bool) -> None:
        super().__init__(16, 32)
        self.later = (later,)
        self.writes, self.from_the_start = writes, from_the_start

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training and (self.from_the_start or self.steps.item() >= FIRST_LATE):
            WRITES[self.writes][0](*self.later)
        return out


def foreseeing(params: dict[str, Any]) -> Recipe:
    """The same net, whose first layer writes to its last one by one of `WRITES`.

    The loss does so instead if the model's graph is cut: `cut` is "export".
    """
    last, by_loss = Multiplied(32, 4), params.get("cut") == "export"
    how = params["writes"], params["from_the_start"]
    first = nn.Linear(16, 32) if by_loss else Foreseeing(last, *how)
    model = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.2), last)
    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=WritingLoss(last, *how) if by_loss else nn.CrossEntropyLoss(),
        metrics=["accuracy"],
        batch_size=16,
        shards=2,
        cut="export" if by_loss else "modules",
    )


class WritingLoss(nn.Module):
    """A loss that writes to a layer, from the first step on or once it has become small."""

    def __init__(self, layer: Multiplied, writes: str, from_the_start: bool) -> None:
        super().__init__()
        self.layer = (layer,)
        self.writes, self.from_the_start = writes, from_the_start

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        found = nn.functional.cross_entropy(outputs, labels)
        if outputs.requires_grad and (self.from_the_start or found.item() < 1.0):
            WRITES[self.writes][0](*self.layer)
        return found


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
