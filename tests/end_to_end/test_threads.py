"""Runs whose agents compute with several threads, and what is done with them afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.storage.run_document import NUMERIC_FILE
from cerebro_hydra.testing.local_backend import LocalBackend
from tests.end_to_end.runs import assert_replays, classes, grid

pytestmark = pytest.mark.slow


class ByThreads(nn.Module):
    """Gives other bits with another number of threads, as a sum of many rows may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.get_num_threads()


def by_threads(params: dict[str, Any]) -> Recipe:
    """Three layers with dropout, in two shards."""
    model = nn.Sequential(nn.Linear(16, 8), ByThreads(), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), ["accuracy"], 16, shards=["3"])


@pytest.mark.parametrize("devices", [None, pytest.param(2, marks=pytest.mark.long)])
def test_every_process_of_a_run_computes_with_its_threads(
    tmp_path: Path, devices: int | None
) -> None:
    here, space = torch.get_num_threads(), {"lr": [0.1]}
    two = LocalBackend(2, devices_per_worker=devices, threads_per_worker=2)
    result = grid(two, tmp_path, by_threads, space, order="seeded").fit(classes())
    found = RunFolder.open(result.run_path).read_json(NUMERIC_FILE)
    assert {each["threads"] for each in found.values()} == {2}
    assert_replays(result)
    assert torch.get_num_threads() == here
    one = LocalBackend(2, devices_per_worker=devices)
    other = grid(one, tmp_path, by_threads, space, order="seeded").fit(classes())
    assert other.trials[0].history["train_loss"] != result.trials[0].history["train_loss"]
    again = grid(one, tmp_path, by_threads, space, order="seeded", num_epochs=3)
    with pytest.raises(ConfigurationError, match=r"threads_per_worker is 1, and the run .* with 2"):
        again.fit(classes(), resume=result.run_path)


@pytest.mark.parametrize("threads", [0, 1.5, True, "2", None, 5000])
def test_unusable_numbers_of_threads_are_refused(threads: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"threads_per_worker is .*; it is a whole number"):
        LocalBackend(2, threads_per_worker=threads)
