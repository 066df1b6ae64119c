"""Models of several trials that take turns have no layer together."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.admission.shared_layers import SharedLayers

BACKBONE = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())


def test_a_layer_that_another_trials_model_has_is_refused_by_name() -> None:
    layers = SharedLayers(by_turns=True)
    for _ in range(2):  # of one trial, also if it is built again
        layers.check("trial-000", nn.ModuleDict({"backbone": BACKBONE, "head": nn.Linear(3, 1)}))
    with pytest.raises(ConfigurationError, match=r"'0\.0\.weight' .* model of trial-000 has.*copy"):
        layers.check("trial-001", nn.Sequential(BACKBONE, nn.Linear(3, 1)))
    weights = nn.Module()
    weights.kept = BACKBONE[0].weight
    with pytest.raises(ConfigurationError, match="parameter 'kept'"):
        layers.check("trial-001", weights)
    with pytest.raises(ConfigurationError, match="module 'act'"):
        layers.check("trial-001", nn.ModuleDict({"act": BACKBONE[2]}))
    layers.check("trial-001", nn.Sequential(copy.deepcopy(BACKBONE), nn.Linear(3, 1)))


def test_elsewhere_one_is_refused_if_a_factory_has_set_it_otherwise() -> None:
    layers, trunk = SharedLayers(by_turns=False), nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1))
    layers.check("trial-000", nn.Sequential(trunk, nn.Linear(3, 1)))
    layers.check("trial-001", nn.Sequential(trunk.eval(), nn.Linear(3, 1)))
    trunk[1].p = 0.5
    with pytest.raises(ConfigurationError, match=r"'0\.1' .* where p is 0\.1, and here 0\.5.*copy"):
        layers.check("trial-002", nn.Sequential(trunk, nn.Linear(3, 1)))
    trunk[1].p = 0.1
    trunk.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="where requires_grad is True, and here False"):
        layers.check("trial-003", nn.Sequential(trunk, nn.Linear(3, 1)))
