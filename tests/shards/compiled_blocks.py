"""Trials whose blocks are compiled, small enough to be compiled in a test."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.shards import trials


class Block(nn.Module):
    """A residual block with what compilers may do otherwise: dropout, statistics, reductions."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(F.gelu(self.norm(self.linear(x))).softmax(1))


def blocks(number: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *(Block() for _ in range(number)), nn.Linear(6, 3))


class Scales(nn.Module):
    """Calls a function that the user has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = torch.compile(scaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * x.mean(1, keepdim=True), 1)


def compiled_by_user() -> nn.Module:
    """Return a model two layers of which were compiled by themselves."""
    return nn.Sequential(nn.Linear(6, 6), torch.compile(Block()), Scales(), nn.Linear(6, 3))


def compiled(shards: int = 3, **rules) -> trials.Make:
    """Return a factory of recipes that compile each block."""
    return trials.recipe_of(blocks, shards=shards, compile=True, **rules)
