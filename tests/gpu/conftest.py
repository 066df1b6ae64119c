"""The device of the suite: the first GPU, else what CEREBRO_HYDRA_TEST_DEVICE names, as "cpu"."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from cerebro_hydra.recipe.randomness import deterministic


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """A device that computes with the same bits each time."""
    asked = os.environ.get("CEREBRO_HYDRA_TEST_DEVICE", "cuda:0")
    if asked.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    with deterministic(torch.device(asked)):
        yield torch.device(asked)
