"""A trial that is trained uncut on an agent has the bits of its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cerebro_hydra.agent.memory.shard_store import Shard
from cerebro_hydra.plan.messages import events
from tests.agent.lone_agent import Agent
from tests.agent.queues.many_shards import BLOCKS, trained_many


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Make an agent that makes no audits."""
    agents = []

    def make(cut: str, everything: bool = False) -> Agent:
        trained, factory = trained_many(cut, everything)
        agents.append(Agent(trained, tmp_path, share=0.0, make=factory))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.mark.parametrize(
    ("cut", "everything"), [("modules", False), ("modules", True), ("export", True)]
)
def test_every_state_has_the_bits_of_its_shards(
    made: Callable[..., Agent], cut: str, everything: bool
) -> None:
    agent = made(cut, everything)
    for visit in (1, 2):
        done = agent.train(visit, uncut=True)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == agent.known(visit)


def test_shards_of_different_states_are_not_trained_uncut(made: Callable[..., Agent]) -> None:
    agent = made("modules")
    agent.train(1)
    held = [agent.shards.wait(0, 1, k) for k in range(BLOCKS + 1)]
    shards = [Shard(dict(each.segments), each.cursor) for each in held]
    shards[2] = replace(shards[2], cursor={**shards[2].cursor, "step": 1})
    state = agent.shards.expect(0, 1, BLOCKS + 1)
    for k, shard in enumerate(shards):
        agent.shards.put(state, k, shard)
    failed = agent.train(2, uncut=True)
    assert isinstance(failed, events.TaskFailed)
    assert "shards of one state have different cursors" in failed.error
