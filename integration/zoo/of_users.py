"""Models of user code, which does what no library does and a cut could lose."""

from __future__ import annotations

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


class LateWriter(nn.Module):
    """The backward of its first layer adapts the gain of its last one to the gradient.

    Args:
        by_tensor: whether a hook of the layer's output does so, else one of the layer.
    """

    def __init__(self, by_tensor: bool) -> None:
        super().__init__()
        layers = [Calibrated(WIDTH) for _ in range(LAYERS)]
        self.layers, self.by_tensor = nn.ModuleList(layers), by_tensor
        self.embed, self.head = nn.Linear(3 * 8 * 8, WIDTH), nn.Linear(WIDTH, CLASSES)
        if not by_tensor:
            layers[0].register_full_backward_hook(lambda *given: self._adapt(given[2][0]))

    def _adapt(self, gradient: Tensor) -> None:
        last = self.layers[-1]
        assert isinstance(last, Calibrated)
        last.gain += gradient.abs().mean()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if self.by_tensor and self.training and not number:
                x.register_hook(self._adapt)
        logits: Tensor = self.head(x)
        return logits


class Chooses(nn.Module):
    """Chooses one of two functions of its values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.embed, self.head = nn.Linear(3 * 8 * 8, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        x = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
        for layer in self.layers:
            x = layer(x).tanh()
        logits: Tensor = self.head(x)
        return logits


IMAGES = images(8, "x", nn.CrossEntropyLoss())

ARCHITECTURES = (
    Architecture("backward_hook_writes", "user code", IMAGES, lambda: LateWriter(by_tensor=False)),
    Architecture("tensor_hook_writes", "user code", IMAGES, lambda: LateWriter(by_tensor=True)),
    Architecture("torch.cond", "user code", IMAGES, Chooses),
)
