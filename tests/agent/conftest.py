"""A trained trial, and an agent that trains it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cerebro_hydra.storage import LocalStore, RunFolder
from tests.agent.lone_agent import Agent, train_without_agent


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of a trial that was trained without an agent, and without audits."""
    return train_without_agent(LocalStore(str(tmp_path_factory.mktemp("trained"))))


@pytest.fixture
def agent(trained: RunFolder, tmp_path: Path) -> Iterator[Agent]:
    made = Agent(trained, tmp_path, share=0.01)
    made.budget.trained = 1e6  # it has trained for long: audits are allowed
    yield made
    made.close()
