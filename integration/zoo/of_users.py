"""Models of user code, which does what no library does and a cut could lose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from integration.zoo.architecture import CLASSES, Architecture, images

WIDTH, LAYERS = 16, 4


class Calibrated(nn.Linear):
    """Scales what it gives by a buffer, which moves in each forward."""

    gain: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("gain", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.gain *= 1.001
        return super().forward(x) * self.gain


class BackwardWriter(nn.Module):
    """The backward hook of its first layer adapts the gain of its last one to the gradient."""

    def __init__(self) -> None:
        super().__init__()
        layers = [Calibrated(WIDTH) for _ in range(LAYERS)]
        self.layers, self.adapted = nn.ModuleList(layers), (layers[-1],)
        self.embed, self.head = nn.Linear(3 * 8 * 8, WIDTH), nn.Linear(WIDTH, CLASSES)
        layers[0].register_full_backward_hook(self._adapt)

    def _adapt(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor]) -> None:
        (last,) = self.adapted
        last.gain += outputs[0].abs().mean()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for layer in self.layers:
            x = layer(x).tanh()
        logits: Tensor = self.head(x)
        return logits


ARCHITECTURES = (
    Architecture(
        "backward_hook_writes", "user code", images(8, "x", nn.CrossEntropyLoss()), BackwardWriter
    ),
)
