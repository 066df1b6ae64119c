"""Marks what needs a CUDA GPU."""

from __future__ import annotations

import os

import pytest
import torch

from cerebro_hydra.agent.device.visible_gpus import VISIBLE

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; see make test-gpu"),
]

GPU = os.environ.get(VISIBLE, "0").split(",")[0]
"""The address of the GPU that tests use."""
