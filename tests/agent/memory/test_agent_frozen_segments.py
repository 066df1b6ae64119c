"""A trial that writes to frozen weights fails, and other trials have these weights as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore
from cerebro_hydra.storage.digest import digest
from tests.agent.lone_agent import BATCH, COLUMNS, Agent, train_without_agent


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


def test_frozen_weights_that_a_trial_wrote_to_are_read_anew(
    tmp_path: Path, make_agent: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = train_without_agent(LocalStore(str(tmp_path / "store")), recipe)
    monkeypatch.setattr(Frozen, "admitted", True)
    agent = make_agent(trained, make=recipe, share=0.0)
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed)
    assert "wrote to frozen parameter '0.weight'" in failed.error
    for number in range(2):
        name, segment = agent.shards.wait(0, 0, number).segments["frozen"]
        assert digest(segment) == name, "they are mended before the failure is told"
    monkeypatch.setattr(Frozen, "admitted", False)
    done = agent.train()
    assert isinstance(done, events.SubEpochDone), done
    assert done.digests == agent.known(1), "whoever trains with them next has plain training's bits"
