"""What grows with the rows that it has met is found at admission, though equal rows add nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from tests.shards import zoo
from tests.shards.hopping import start
from tests.shards.trials import made

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


class OfLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[float] = set()

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.seen.add(key_of(outputs[0]))
        return nn.functional.cross_entropy(outputs, labels) * (2 if len(self.seen) > RARE else 1)


@pytest.mark.parametrize("model", [InASet, InAList, InAText, InADict, Largest])
def test_what_a_model_has_met_is_refused_by_name(model: type[zoo.Net]) -> None:
    with pytest.raises(ConfigurationError, match=r"changes attribute 'seen' of the model"):
        start(made(model, shards=1)(), BATCHES)


def test_what_a_loss_has_met_is_refused_by_name() -> None:
    make = made(zoo.Net, lambda model: OfLoss(), shards=1)
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
