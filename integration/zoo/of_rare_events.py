"""Trials of our own in which something changes only with an event that the first steps don't have.

They are cut and train exactly until then. What is found is no result of the zoo: it must be found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


class MakesFirst(Event):
    """Makes a number in its first forward, and computes with it."""

    def __init__(self) -> None:
        super().__init__(_halves)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.made = 1.0
        return super().forward(x) * self.made


def _halves(event: Event) -> None:
    assert isinstance(event, MakesFirst)
    event.made *= 0.5


class Cautious(nn.CrossEntropyLoss):
    """Counts less from the first time that it is large."""

    large = 4.0
    share: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.ones(()))

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(outputs, labels)
        if self.training and loss.detach() > self.large:
            self.share *= 0.5
        return loss * self.share


class ClipsLate(torch.optim.AdamW):
    """Clips by the norm of all gradients that it sees, once one of them has changed often enough.

    Those that it is tried with before its first step never change.
    """

    freely, most = 4, 1e-3
    """Changes without clipping, which are more than those of admission, and the norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        given = [p for p in group["params"] if p.grad is not None]
        known = [self.state[p] for p in given if p in self.state]
        for parameter, kept in zip(given, known, strict=False):
            kept["changes"] += not torch.equal(kept["before"], parameter.grad)
            kept["before"].copy_(parameter.grad)
        if any(kept["changes"] > self.freely for kept in known):
            nn.utils.clip_grad_norm_(given, self.most)
        super().step(closure)
        for parameter in given if not known else ():
            first = {"changes": torch.zeros(()), "before": parameter.grad.clone()}
            self.state[parameter].update(first)


def _layers(first: nn.Module) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4)]
    embed, last = nn.Linear(3 * 8 * 8, HIDDEN), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(first, nn.Flatten(), embed, *blocks, last)


def _net(name: str, make: Callable[[], Event]) -> Architecture:
    task = images(8, "x", nn.CrossEntropyLoss())
    return Architecture(name, "ours", task, lambda: _layers(make()))


class Glare(nn.Module):
    """Gives outputs of a rare brightness, which make a large loss, and has no state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _layers(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        least, most = RARE
        logits: Tensor = self.net(x)
        return logits * 100 if least < x.detach().abs().max() < most else logits


EVENTS = (
    (
        _net("an attribute that acts", lambda: Event(_dampens)),
        "training changed attribute 'gain' of module '0'",
    ),
    (
        _net("a counter that would act", lambda: Event(_counts)),
        "training changed attribute 'ticks' of module '0'",
    ),
    (
        _net("a number that the first forward makes", MakesFirst),
        "training changed attribute 'made' of module '0'",
    ),
    (
        Architecture("a loss with a threshold", "ours", images(8, "x", Cautious()), Glare),
        "training changed buffer 'share' of the loss",
    ),
    (
        Architecture(
            "an optimizer that clips later", "ours", images(8, "x", nn.CrossEntropyLoss()),
            lambda: _layers(nn.Identity()), lambda m: ClipsLate(m.parameters(), lr=1e-3), rounds=2,
        ),
        "the optimizer updates parameter",
    ),
)  # fmt: skip
"""Each with what training in any cut must say of it."""


def is_found(measured: Measured, by: str) -> bool:
    """Return whether training has told of an event in each cut."""
    return all(by in (cut.differs or "") for cut in measured.cuts)
