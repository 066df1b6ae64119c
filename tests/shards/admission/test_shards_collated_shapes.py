"""A cut takes every shape that collate makes, not only those that admission saw."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import Columns, Recipe
from tests.shards.executors.executor_case import Proof
from tests.shards.trials import seeded

LENGTH = 8


class Words(nn.Module):
    """Takes for granted that its input lies in memory row by row, as prepared columns do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, tokens):
        x = self.embed(tokens.view(-1)).view(*tokens.shape, 6)
        return self.b(torch.tanh(self.a(x)).mean(1))


def trimmed(batch, training):
    longest = int((batch["tokens"] > 0).sum(1).max())
    return batch | {"tokens": batch["tokens"][:, :longest]}


def make() -> Recipe:
    return seeded(Words, collate=trimmed)().bind(Columns(("tokens",), ("label",)))


def batch(rows, longest):
    g = torch.Generator().manual_seed(longest)
    tokens = torch.randint(1, 20, (rows, LENGTH), generator=g)
    tokens[:, longest:] = 0
    return Batch((tokens,), (torch.randint(3, (rows,), generator=g),), rows)


@pytest.mark.parametrize("cut", ["modules", "export"])
@pytest.mark.parametrize("seen", [5, LENGTH])
def test_longer_and_shorter_batches_than_those_of_admission_are_exact(seen, cut):
    windows = [[batch(6, longest)] for longest in (5, LENGTH, 3, 7)]
    one = Proof(make, [windows], cut, seen=[[batch(6, seen)], [batch(4, seen)]])
    assert one.trial.admission.report.fallback is None
    one.check([one.trial.train(windows).loss_sum])


def test_collated_columns_lie_in_memory_row_by_row():
    given = batch(6, 5)
    (tokens,), _ = make().collated(given.features, given.labels, None)
    assert tokens.shape == (6, 5)
    assert tokens.is_contiguous()
