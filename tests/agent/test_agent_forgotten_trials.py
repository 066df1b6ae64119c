"""An agent forgets a trial that is over, and builds one anew that it did not use for long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro_hydra.agent.device import builder as trial_builder
from cerebro_hydra.agent.device.builder import TrialBuilder
from cerebro_hydra.agent.memory.checkpoint import write_segments
from cerebro_hydra.agent.memory.shard_store import KEPT_TRIALS, Shard
from cerebro_hydra.errors import TransferError
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.digest import digest
from cerebro_hydra.storage.run_folder import read_document
from tests.agent.lone_agent import Agent
from tests.agent.standins import empty_store, shard
from tests.agent.test_agent_trainer import TASK, VISIT, Bench

WORDS = {name: np.frombuffer(name.encode(), np.uint8) for name in ("frozen", "trainable")}


@pytest.fixture
def specs(trained: RunFolder) -> Any:
    document = read_document(trained)
    return trained.read_trial(0, document.run_id)


def test_a_trial_that_is_built_anew_has_the_same_bits(agent: Agent, specs: Any) -> None:
    for visit in (1, 2):
        assert agent.train(visit).digests == agent.known(visit)
        agent.trainer.forget(0)
        agent.settle()
        agent.trainer.learn(specs)
    assert len(agent.built) == 4, "the factory builds the trial and a model to audit, twice"


def test_trials_that_were_not_used_for_long_are_built_anew(
    agent: Agent,
    specs: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial_builder, "MOST_RUNTIMES", 2)
    builder = TrialBuilder(agent.builder._document, agent._factory, agent.builder._training, {})
    for trial in range(3):
        builder._specs[trial] = specs
    for trial in (0, 1, 0, 2, 0, 1):
        builder.get(trial)
    assert len(agent.built) == 4
    assert [builder.keeps(trial) for trial in range(3)] == [True, True, False]


def test_nothing_is_left_of_a_trial_that_is_over(agent: Agent) -> None:
    assert agent.train(1).audit_seconds > 0
    agent.trainer.drop(0, 1)
    agent.trainer.forget(0)
    agent.settle()
    assert not agent.builder._specs and not agent.builder.keeps(0)
    assert not agent.runs._spares and not agent.audits._seconds and not agent.audits._spares
    assert not agent.fetches._hops and not agent.known_seconds._seconds
    assert not agent.state.runs


def test_attempts_that_were_taken_back_are_forgotten_when_they_are_done() -> None:
    bench = Bench(train=lambda: bench.trainer.cancel(TASK.attempt), told=lambda: bench.lane.close())
    try:
        bench.perform()
        bench.trainer.cancel(TASK.attempt)
        bench.trainer.cancel(TASK.attempt + 1)
        bench.settle()
        assert bench.reported == []
        assert not bench.shard_store.knows(0, VISIT)
        assert not bench.state.runs
    finally:
        bench.trainer.close()


def test_frozen_segments_stay_for_the_next_trials_and_not_for_ever() -> None:
    store = empty_store()
    for trial in range(3 + KEPT_TRIALS):
        store.put(store.expect(trial, 0, 1), 0, shard(f"own-{trial}", f"t-{trial}"))
        store.withdraw(trial, 0)
        assert f"own-{trial}" in store.segments.digests()
        store.forget(trial)
    last = {f"own-{trial}" for trial in range(3, 3 + KEPT_TRIALS)}
    assert store.segments.digests() == last


def test_frozen_segments_of_a_living_trial_or_a_held_state_are_not_forgotten() -> None:
    store = empty_store()
    store.put(store.expect(100, 0, 1), 0, shard("shared", "t"))
    store.withdraw(100, 0)
    held = store.expect(0, 0, 1)
    store.put(held, 0, shard("own", "t-0"))
    for trial in range(2 * KEPT_TRIALS):
        store.put(store.expect(trial + 1, 0, 1), 0, shard("shared", f"t-{trial + 1}"))
        store.withdraw(trial + 1, 0)
        store.forget(trial)
    assert {"shared", "own", "t-0"} <= store.segments.digests()
    store.withdraw(0, 0)
    assert "own" not in store.segments.digests()


def test_a_state_that_a_fork_needs_can_be_written_after_its_trial_is_over(tmp_path: Path) -> None:
    store, folder = empty_store(), RunFolder(LocalStore(str(tmp_path)), "run")
    segments = {name: (digest(word), word) for name, word in WORDS.items()}
    store.put(store.expect(0, 3, 1), 0, Shard(segments, {"step": 1}))
    store.forget(0)
    for trial in range(1, 2 + KEPT_TRIALS):
        store.put(store.expect(trial, 0, 1), 0, shard(f"own-{trial}", f"t-{trial}"))
        store.forget(trial)
    assert 0 not in store._frozen
    (written,) = write_segments(folder, store, 0, 3)["shards"]
    assert folder.has_object(written["frozen"]) and folder.has_object(written["trainable"])
    store.withdraw(0, 3)
    with pytest.raises(TransferError, match="state 3 of trial 0 is not here"):
        store.num_shards(0, 3)


def test_the_budget_follows_the_largest_trial(tmp_path: Path) -> None:
    segments = empty_store(100).segments
    segments.raise_budget(1000)
    segments.raise_budget(500)
    assert segments.has_room(1000) and not segments.has_room(1001)
