"""Makes the net of `cerebro_hydra/demo.py`, which several benchmarks train."""

from __future__ import annotations

from torch import nn


def demo_net() -> nn.Module:
    """Return a new one."""
    return nn.Sequential(
        nn.Linear(64, 1060), nn.ReLU(), nn.Linear(1060, 1060), nn.ReLU(), nn.Linear(1060, 10)
    )
