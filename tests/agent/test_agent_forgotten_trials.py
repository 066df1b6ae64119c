"""An agent forgets a trial that is over, and builds one anew that it did not use for long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cerebro_hydra.agent.device import builder as trial_builder
from cerebro_hydra.agent.device.builder import TrialBuilder
from cerebro_hydra.agent.memory.checkpoint import write_segments
from cerebro_hydra.agent.memory.shard_store import KEPT_TRIALS, Shard
from cerebro_hydra.errors import TransferError
from cerebro_hydra.plan.messages import events
from cerebro_hydra.storage import LocalStore, RunFolder
from cerebro_hydra.storage.digest import digest
from tests.agent.lone_agent import Agent
from tests.agent.standins import empty_store, shard

WORDS = {name: np.frombuffer(name.encode(), np.uint8) for name in ("frozen", "trainable")}


def test_a_trial_that_is_built_anew_has_the_same_bits(agent: Agent) -> None:
    for state in (1, 2):
        done = agent.train(state)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == agent.known(state)
        assert len(agent.built) == 2, "the factory builds the trial and a model to audit"
        agent.trainer.forget(0)
        agent.settle()
        agent.built.clear()


def test_trials_that_were_not_used_for_long_are_built_anew(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_builder, "MOST_RUNTIMES", 2)
    builder = TrialBuilder(agent.document, agent.factory, agent.partitions, {})
    for trial in range(3):
        builder.add(replace(agent.spec, trial=trial))
    for trial in (0, 1, 0, 2, 0, 1):
        builder.get(trial)
    assert len(agent.built) == 4
    assert [builder.keeps(trial) for trial in range(3)] == [True, True, False]


def test_nothing_is_left_of_a_trial_that_is_over(agent: Agent) -> None:
    worker = agent.worker
    parts = [agent.builder, agent.runs, agent.audits, worker.fetches, worker.planner]

    def held() -> dict[tuple[str, str], int]:
        """What each part holds by trial, whatever it calls it."""
        return {
            (type(part).__name__, name): len(value)
            for part in parts
            for name, value in vars(part).items()
            if isinstance(value, dict | set)
        }

    agent.builder.forget(0)
    before = held()
    assert agent.train(1).audit_seconds > 0
    assert held() != before
    for state in range(2):
        agent.worker.fetches.drop(0, state)
    agent.trainer.forget(0)
    agent.settle()
    assert held() == before and not agent.builder.keeps(0)
    assert not worker.state.visits


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
    (written,) = write_segments(folder, store, 0, 3)["shards"]
    assert folder.has_object(written["frozen"]) and folder.has_object(written["trainable"])
    store.withdraw(0, 3)
    assert written["frozen"] not in store.segments.digests(), "its trial was forgotten before"
    with pytest.raises(TransferError, match="state 3 of trial 0 is not here"):
        store.num_shards(0, 3)
