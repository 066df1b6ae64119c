"""MLP, ResNet-18 and ViT, small: every promise of the suite of models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.testing.model_case import ModelCase, Shards
from tests.conformance import vision

pytestmark = pytest.mark.kernels

Example = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def images(rows: int, size: int, seed: int) -> Example:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, size, size, generator=g)
    return (x,), (torch.randint(3, (rows,), generator=g),)


class TestMLP(ModelCase):
    in_processes = False

    def recipe(self, shards: Shards) -> Recipe:
        model = vision.mlp(6, 16, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), ["accuracy"], shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 6, generator=g)
        return (x,), (torch.randint(3, (rows,), generator=g),)


@pytest.mark.long
class TestResNet18(ModelCase):
    cuts = (2, 4)

    def recipe(self, shards: Shards) -> Recipe:
        model = vision.ResNet18(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), ["accuracy"], shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        return images(rows, 32, seed)


class TestViT(ModelCase):
    """As transformers gives it: pixels by the name of their column, a dataclass as output."""

    in_processes = False
    columns = Columns(("pixel_values",), ("label",))

    def recipe(self, shards: Shards) -> Recipe:
        model = vision.vit(16, 2, 8, 4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return Recipe(model, optimizer, nn.CrossEntropyLoss(), ["accuracy"], shards=shards)

    def batch(self, rows: int, seed: int) -> Example:
        return images(rows, 8, seed)
