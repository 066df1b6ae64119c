"""Several inputs or outputs, and a recommender, small: every promise of the suite of models."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.testing.model_case import ModelCase, Shards
from tests.conformance import tables

Example = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


class TestImageAndTable(ModelCase):
    in_processes = False
    columns = Columns(("image", "table"), ("label",))

    def recipe(self, shards: Shards) -> Recipe:
        model = tables.ImageAndTable(4, 5, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), ["accuracy"], shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        g = torch.Generator().manual_seed(seed)
        image = torch.randn(rows, 3, 8, 8, generator=g)
        table = torch.randn(rows, 5, generator=g)
        return (image, table), (torch.randint(3, (rows,), generator=g),)


class TestTwoTasks(ModelCase):
    """One loss per output, weighted; and a column says what each row counts."""

    in_processes = False
    columns = Columns(("features",), ("kind", "amount"), "weight")
    cuts = (2, 4)

    def recipe(self, shards: Shards) -> Recipe:
        model = tables.TwoTasks(6, 16, 3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = [nn.CrossEntropyLoss(), nn.MSELoss()]
        return Recipe(model, optimizer, losses, shards=shards, loss_weights=[1.0, 0.25])

    def batch(self, rows: int, seed: int) -> Example:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 6, generator=g)
        kind = torch.randint(3, (rows,), generator=g)
        amount = torch.randn(rows, generator=g)
        return (x,), (kind, amount, torch.rand(rows, generator=g))


class TestRecommender(ModelCase):
    in_processes = False
    columns = Columns(("user", "item", "seen"), ("rating",))

    def recipe(self, shards: Shards) -> Recipe:
        model = tables.Recommender(200, 100, 8)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
        return Recipe(model, optimizer, nn.MSELoss(), shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        g = torch.Generator().manual_seed(seed)
        user = torch.randint(200, (rows,), generator=g)
        item = torch.randint(100, (rows,), generator=g)
        seen = torch.randint(100, (rows, 5), generator=g)
        return (user, item, seen), (torch.rand(rows, generator=g),)


class TestFloat16(TestTwoTasks):
    """Steps overflow at first, and again when the scale has grown; the replay skips them, too."""

    def recipe(self, shards: Shards) -> Recipe:
        recipe = super().recipe(shards)
        scaler = torch.amp.GradScaler("cpu", 1e6, growth_factor=5.0, growth_interval=1)
        return replace(recipe, autocast="float16", grad_scaler=scaler, clip_grad_norm=0.5)
