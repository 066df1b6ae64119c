"""Agents that train a trained trial again."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.effects.as_built import AsBuilt
from cerebro_hydra.storage import LocalStore, RunFolder
from tests.agent.late_events import HAPPENS
from tests.agent.lone_agent import WIDTH, Agent, train_without_agent, trained_many


@pytest.fixture(autouse=True)
def no_factories_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be known of factories of earlier tests, which have set what tests switch."""
    fresh = {"_all": weakref.WeakSet(), "_left": {}, "_differ": set(), "_anew": {}}
    for name, own in fresh.items():
        monkeypatch.setattr(AsBuilt, name, own)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run of a trial that was trained without an agent, and without audits."""
    return train_without_agent(LocalStore(str(tmp_path_factory.mktemp("trained"))))


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Make agents of a trial of many shards, by its cut, or of another trained trial."""
    agents: list[Agent] = []

    def make(
        cut: str | RunFolder, everything: bool = False, width: int = WIDTH, **options: Any
    ) -> Agent:
        if isinstance(cut, RunFolder):
            agents.append(Agent(cut, tmp_path, **options))
        else:
            trained, factory = trained_many(cut, everything, width)
            agents.append(Agent(trained, tmp_path, make=factory, **options))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def agent(trained: RunFolder, make_agent: Callable[..., Agent]) -> Agent:
    return make_agent(trained)


@pytest.fixture
def start(tmp_path: Path, make_agent: Callable[..., Agent]) -> Iterator[Callable[..., Agent]]:
    """Make agents that train a trial again, in which something happens that did not before."""
    stores = itertools.count()

    def starts(make: Callable[[], Recipe], **options: Any) -> Agent:
        HAPPENS[0] = False
        trained = train_without_agent(LocalStore(str(tmp_path / f"store-{next(stores)}")), make)
        HAPPENS[0] = True
        return make_agent(trained, make=make, **options)

    yield starts
    HAPPENS[0] = False
