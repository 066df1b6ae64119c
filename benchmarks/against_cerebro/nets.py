"""Builds the nets in PyTorch, for our part and for the floor."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from work import ADAM_EPSILON, NETS


def make_net(name: str) -> nn.Sequential:
    """Return a feed-forward net with ReLU between its layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(NETS[name]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_adam(model: nn.Module, lr: float) -> torch.optim.Adam:
    """Return torch's Adam with Keras's epsilon, fused into one kernel as Keras's is."""
    return torch.optim.Adam(model.parameters(), lr=lr, eps=ADAM_EPSILON, fused=True)
