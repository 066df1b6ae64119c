"""A trial that writes to frozen weights fails, and other trials have these weights as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.testing.run_in_process import run_in_process
from tests.agent.lone_agent import BATCH, COLUMNS, ROWS, Agent
from tests.shards.hopping import start


class Frozen(nn.Linear):
    """Writes to its frozen weight in training, once it is admitted."""

    admitted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Frozen.admitted and self.training:
            self.weight.data.mul_(2)
        return super().forward(x)


def recipe() -> Recipe:
    model = nn.Sequential(Frozen(6, 16).requires_grad_(False), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    made = Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=BATCH, shards=2)
    return made.bind(COLUMNS)


class LateWriter(Agent):
    def _factory(self, params: Any) -> Recipe:
        return recipe()


def test_frozen_weights_that_a_trial_wrote_to_are_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).normal(size=(2 * ROWS, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    batch = Batch((torch.from_numpy(x[:BATCH]),), (torch.from_numpy(y[:BATCH]),), BATCH)
    store = LocalStore(str(tmp_path / "store"))
    trained = run_in_process(store, {"x": x, "y": y}, COLUMNS, start(recipe(), [[batch]]), {})
    agent = LateWriter(trained, tmp_path, share=0.0)
    monkeypatch.setattr(Frozen, "admitted", True)
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed)
    assert "wrote to frozen parameter '0.weight'" in failed.error
    for number in range(2):
        name, segment = agent.shards.wait(0, 0, number).segments["frozen"]
        assert digest(segment) == name, "they are mended before the failure is told"
    monkeypatch.setattr(Frozen, "admitted", False)
    done = agent.train()
    agent.close()
    assert isinstance(done, events.SubEpochDone), done
    assert done.digests == agent.known(1), (
        "who trains with them next has the bits of plain training"
    )
