"""A cut takes every shape that collate makes, not only those that admission saw."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe
from cerebro_hydra.shards.admission.admit import admit
from cerebro_hydra.shards.cut.model import CutModelCache
from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.engine.differences import same_bits
from cerebro_hydra.testing.run_in_process import CutTrial

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


def make():
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recipe = Recipe(model, optimizer, nn.CrossEntropyLoss(), shards=2, collate=trimmed)
    return recipe.bind(Columns(("tokens",), ("label",)))


def batch(rows, longest, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 20, (rows, LENGTH), generator=g)
    tokens[:, longest:] = 0
    return Batch((tokens,), (torch.randint(3, (rows,), generator=g),), rows)


@pytest.mark.parametrize("seen", [5, LENGTH])
def test_longer_and_shorter_batches_than_those_of_admission_are_exact(seen):
    recipe, cache = make(), CutModelCache()
    examples = [(b.features, b.labels) for b in (batch(6, seen), batch(4, seen))]
    admission = admit(recipe, examples, 1, cache)
    assert admission.report.fallback is None
    cut_model = cache.get(recipe.model, admission.spec, Sample.of(recipe, examples[0]))
    trial, plain = CutTrial(recipe, admission, cut_model, 1, 4), PlainTrainer(make(), 1, 4)
    windows = [[batch(6, longest, seed=longest)] for longest in (5, LENGTH, 3, 7)]
    trial.train(windows)
    assert trial.losses == [loss for window in windows for loss in plain.step(window)]
    expected = plain.tensors()
    assert all(same_bits(t, expected[name]) for name, t in trial.tensors().items())


def test_collated_columns_lie_in_memory_row_by_row():
    given = batch(6, 5)
    (tokens,), _ = make().collated(given.features, given.labels, None)
    assert tokens.shape == (6, 5)
    assert tokens.is_contiguous()
