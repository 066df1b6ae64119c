"""Models of our own whose attributes change with a rare event, which the first steps don't have.

They are cut and train exactly until then. What is found is no result of the zoo: it must be found.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from integration.zoo.architecture import CLASSES, Architecture, images
from integration.zoo.measure import Measured

HIDDEN = 16
RARE = 3.34, 4.0
"""Between these is the brightest point of one batch of a sub-epoch, and of none of admission."""


class Event(nn.Module):
    """Does something to itself when its input is of a rare brightness."""

    def __init__(self, happens: Callable[[Event], object]) -> None:
        super().__init__()
        self.happens = happens
        self.gain = 1.0
        self.ticks = 0

    def forward(self, x: Tensor) -> Tensor:
        least, most = RARE
        if self.training and least < x.detach().abs().max() < most:
            self.happens(self)
        return x * self.gain


def _dampens(event: Event) -> None:
    event.gain *= 0.5


def _counts(event: Event) -> None:
    event.ticks += 1
    event.gain = 0.5 if event.ticks == 7 else 1.0


def _net(name: str, happens: Callable[[Event], object]) -> Architecture:
    def build() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4)]
        first, last = nn.Linear(3 * 8 * 8, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        return nn.Sequential(Event(happens), nn.Flatten(), first, *blocks, last)

    return Architecture(name, "ours", images(8, "x", nn.CrossEntropyLoss()), build)


EVENTS = (
    (_net("an attribute that acts", _dampens), "training changed attribute 'gain' of module '0'"),
    (_net("a counter that would act", _counts), "training changed attribute 'ticks' of module '0'"),
)
"""Each with what training in any cut must say of it."""


def is_found(measured: Measured, by: str) -> bool:
    """Return whether training has told of an event in each cut."""
    return all((cut.differs or "").startswith(by) for cut in measured.cuts)
