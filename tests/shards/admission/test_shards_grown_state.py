"""What follows from the rows that were met is refused, though equal rows add nothing to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from tests.shards import zoo
from tests.shards.hopping import start
from tests.shards.trials import Make, made

BATCHES = zoo.singly(zoo.vectors(8, 8, 5))
RARE = 1000
"""How much must have been met before it acts, which is later than any step of a test."""


def key_of(row: Tensor) -> float:
    return round(row.detach().sum().item(), 4)


class InASet(zoo.Net):
    def add(self):
        self.seen = set()

    def forward(self, x):
        if self.training:
            self.seen.update(map(key_of, x))
        return super().forward(x) * (2 if len(self.seen) > RARE else 1)


class InAList(zoo.Net):
    def add(self):
        self.seen = []

    def forward(self, x):
        for key in map(key_of, x):
            if self.training and key not in self.seen:
                self.seen.append(key)
        return super().forward(x) * (2 if len(self.seen) > RARE else 1)


class InAText(zoo.Net):
    def add(self):
        self.seen = ""

    def forward(self, x):
        if self.training and (key := f",{key_of(x[0])}") not in self.seen:
            self.seen += key
        return super().forward(x) * (2 if len(self.seen) > RARE else 1)


class InADict(zoo.Net):
    """Weighs rows by whether they were met before."""

    def add(self):
        self.seen = {}

    def forward(self, x):
        keys = [*map(key_of, x)]
        known = torch.tensor([[float(key in self.seen)] for key in keys])
        if self.training:
            self.seen |= dict.fromkeys(keys, True)
        return super().forward(x) + 0.1 * known


class Largest(zoo.Net):
    def add(self):
        self.seen = 0.0

    def forward(self, x):
        if self.training:
            self.seen = max(self.seen, x.abs().max().item())
        return super().forward(x) * (2 if self.seen > RARE else 1)


class LargestOutput(zoo.Net):
    """Its weights grow in the first steps, so that each of these sets it as if for good."""

    def add(self):
        self.seen = 0.0

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.seen = max(self.seen, y.detach().abs().max().item())
        return y * (2 if self.seen > RARE else 1)


class SmallestLoss(nn.Module):
    seen = float("inf")

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        self.seen = min(self.seen, loss.item())
        return loss * (2 if self.seen < 1 / RARE else 1)


class OfLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[float] = set()

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.seen.add(key_of(outputs[0]))
        return nn.functional.cross_entropy(outputs, labels) * (2 if len(self.seen) > RARE else 1)


@pytest.mark.parametrize("model", [InASet, InAList, InAText, InADict, Largest, LargestOutput])
def test_what_a_model_has_met_is_refused_by_name(model: type[zoo.Net]) -> None:
    with pytest.raises(ConfigurationError, match=r"changes attribute 'seen' of the model"):
        start(made(model, shards=1)(), BATCHES)


@pytest.mark.parametrize("loss", [OfLoss, SmallestLoss])
def test_what_a_loss_has_met_is_refused_by_name(loss: type[nn.Module]) -> None:
    make = made(zoo.Net, lambda model: loss(), shards=1)
    with pytest.raises(ConfigurationError, match="changes attribute 'seen' of the loss"):
        start(make(), BATCHES)


class TablesByRows(zoo.Net):
    """Keeps what follows from a row alone, and a set of the shapes that it has met."""

    def add(self):
        self.made, self.shapes, self.first = {}, set(), None

    def forward(self, x):
        self.shapes.add(tuple(x.shape))
        if self.first is None:
            self.first = x.detach().mean().item()  # for a log
        norms = [self.made.setdefault(key_of(row), row.detach().norm()) for row in x]
        return super().forward(x / torch.stack(norms).unsqueeze(1))


def test_a_cache_by_rows_and_what_grows_with_shapes_alone_train() -> None:
    start(made(TablesByRows, shards=1)(), BATCHES).train(BATCHES)


class ByFirstLoss(nn.Module):
    """Divides by the first loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first: float | None = None

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        if self.first is None:
            self.first = loss.item()
        return loss / self.first


def by_first_loss() -> Callable[[Tensor, Tensor], Tensor]:
    first = None

    def of_closure(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal first
        loss = nn.functional.cross_entropy(outputs, labels)
        first = loss.item() if first is None else first
        return loss / first

    return of_closure


class Standardizes:
    """Is a collate that takes the mean of the first batch away."""

    def __init__(self) -> None:
        self.mean = None

    def __call__(self, batch, training):
        first, *others = batch.values()
        self.mean = first.mean(0) if self.mean is None else self.mean
        return dict(zip(batch, (first - self.mean, *others), strict=True))


class Fits(Standardizes):
    """Writes it where there is room, with a flag."""

    def __init__(self) -> None:
        self.mean, self.fitted = torch.zeros(6), False

    def __call__(self, batch, training):
        first, *others = batch.values()
        if training and not self.fitted:
            self.mean.copy_(first.mean(0))
            self.fitted = True
        return dict(zip(batch, (first - self.mean, *others), strict=True))


MEAN: Tensor | None = None


def by_global(batch, training):
    global MEAN
    first, *others = batch.values()
    MEAN = first.mean(0) if MEAN is None else MEAN
    return dict(zip(batch, (first - MEAN, *others), strict=True))


FIRST: dict[str, tuple[Make, str]] = {
    "attribute of a loss": (
        made(zoo.Net, lambda model: ByFirstLoss(), shards=1), "attribute 'first' of the loss"
    ),
    "variable of a loss's closure": (
        made(zoo.Net, lambda model: by_first_loss(), shards=1), r"a value of the loss at \.first"
    ),
    "attribute of a collate": (
        made(zoo.Net, collate=Standardizes(), shards=1), r"a value of the collate at \.mean"
    ),
    "what a collate fits": (
        made(zoo.Net, collate=Fits(), shards=1), r"a value of the collate at \.mean"
    ),
    "global variable": (
        made(zoo.Net, collate=by_global, shards=1), "global variable 'MEAN' of tests"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FIRST)
def test_what_a_loss_or_collate_keeps_of_the_first_rows_is_refused_by_name(what: str) -> None:
    make, name = FIRST[what]
    with pytest.raises(ConfigurationError, match=f"{name}.* depends on weights or rows"):
        start(make(), BATCHES)


class KnowsForms(nn.Module):
    """A loss that keeps the number of classes, and for a log the first loss."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.first, self.begun = None, None, False

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        if not self.begun:
            self.classes, self.first, self.begun = outputs.shape[1], loss.item(), True
        return loss * self.classes


def test_a_loss_may_keep_what_follows_from_no_rows_and_what_nothing_computes_with() -> None:
    trial = start(made(zoo.Net, lambda model: KnowsForms(), shards=1)(), BATCHES)
    trial.train(BATCHES)
    assert trial.recipe.loss.begun
