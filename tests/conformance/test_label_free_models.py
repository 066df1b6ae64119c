"""A VAE and SimCLR, which no label trains: every promise of the suite of models."""

from __future__ import annotations

import torch
from torch import Tensor

from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.testing.model_case import ModelCase, Shards
from tests.conformance import label_free

Example = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


class LabelFree(ModelCase):
    columns = Columns(("features",), ())
    cuts = (2,)
    in_processes = False

    def batch(self, rows: int, seed: int) -> Example:
        return (torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)),), ()


class TestVAE(LabelFree):
    """The loss takes a feature column by its name; so does a metric."""

    def recipe(self, shards: Shards) -> Recipe:
        model = label_free.VAE(6, 8, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        metrics = {"mse": (label_free.reconstruction, "min")}
        return Recipe(model, optimizer, label_free.elbo, metrics, shards=shards)


class TestSimCLR(LabelFree):
    """Collate makes both inputs, by random numbers; the loss takes outputs alone."""

    def recipe(self, shards: Shards) -> Recipe:
        model = label_free.TwoViews(6, 8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return Recipe(
            model, optimizer, label_free.nt_xent, shards=shards, collate=label_free.two_views
        )


del LabelFree
