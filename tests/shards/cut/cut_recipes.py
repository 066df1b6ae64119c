"""Recipes of models that are to be cut, and what each shard owns."""

from __future__ import annotations

import torch
from torch import nn

from cerebro_hydra.recipe import Recipe


def recipe_of(model, shards=2, loss=None, **rules):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Recipe(model, optimizer, loss or nn.CrossEntropyLoss(), shards=shards, **rules)


def seeded(build, shards=2, **rules):
    def make():
        torch.manual_seed(2)
        return recipe_of(build(), shards, **rules)

    return make


def owned(trial, shard):
    return tuple(p.name for p in trial.cut_model.params if p.owner == shard)
