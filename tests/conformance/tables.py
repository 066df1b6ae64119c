"""Models of several inputs or outputs, and of categories."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ImageAndTable(nn.Module):
    """An image and a row of numbers, encoded apart and judged together."""

    def __init__(self, width: int, numbers: int, classes: int) -> None:
        super().__init__()
        self.image_encoder = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.table_encoder = nn.Sequential(
            nn.Linear(numbers, 4 * width), nn.LayerNorm(4 * width), nn.GELU(), nn.Dropout(0.2)
        )
        self.head = nn.Sequential(
            nn.Linear(6 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, classes)
        )

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.head(torch.cat([self.image_encoder(image), self.table_encoder(table)], 1))


class TwoTasks(nn.Module):
    """A class and a number from one body."""

    def __init__(self, features: int, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(features, hidden)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Dropout(0.1))
            for _ in range(layers)
        )
        self.kind = nn.Linear(hidden, classes)
        self.amount = nn.Linear(hidden, 1)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(features)
        for layer in self.body:
            x = x + layer(x)
        return self.kind(x), self.amount(x).squeeze(1)


class Recommender(nn.Module):
    """Nearly all of it is tables of users and items."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.history = nn.EmbeddingBag(items, width, mode="mean")
        self.tower = nn.Sequential(
            nn.Linear(3 * width, width), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, user: Tensor, item: Tensor, seen: Tensor) -> Tensor:
        joined = torch.cat([self.users(user), self.items(item), self.history(seen)], 1)
        return self.tower(joined).squeeze(1)
