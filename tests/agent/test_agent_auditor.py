"""An agent audits its steps: real engine, store and decisions of when, in this process."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.agent.memory.segment_store import SegmentStore
from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.engine import sub_epoch
from cerebro_hydra.storage import RunFolder
from tests.agent.lone_agent import BATCH, ROWS, Agent, recipe, recipe_of
from tests.agent.queues.test_agent_queue_audits import refuse_copies


def test_an_audit_changes_no_bit(agent: Agent) -> None:
    for visit in (1, 2):
        done = agent.train(visit)
        assert isinstance(done, events.SubEpochDone), done
        assert done.audit_seconds > 0
        assert done.digests == agent.known(visit)
    assert len(agent.built) == 3, "the factory builds the trial, and a model for each audit"


def test_an_audit_leaves_all_random_numbers_as_they_are(agent: Agent) -> None:
    drawn: list[Any] = []
    agent.train()
    for share in (0.01, 0.0):
        agent.budget.share = share
        torch.manual_seed(5)
        random.seed(7)
        np.random.seed(7)
        agent.train(2)
        drawn.append((random.random(), np.random.rand(), torch.rand(())))
    assert drawn[0] == drawn[1]
    assert len(agent.built) == 3


def test_a_trial_trained_uncut_has_the_same_bits_and_is_audited(agent: Agent) -> None:
    assert agent.train(1, uncut=True).digests == agent.known(1)
    done = agent.train(2, uncut=True)
    assert done.digests == agent.known(2)
    assert done.audit_seconds > 0


def broken_from(
    step: int, change: Callable[[torch.Tensor], object], parameter: str = "7.bias"
) -> Any:
    """Return an engine's update that changes a parameter after each step from this one on."""
    update = sub_epoch.SubEpoch.update

    def wrong(self: Any, k: int) -> None:
        update(self, k)
        if self.step >= step and parameter in self._states[k].params:
            with torch.no_grad():
                change(self._states[k].params[parameter])

    return wrong


def test_an_engine_that_breaks_is_caught_in_its_first_epoch(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sub_epoch.SubEpoch, "update", broken_from(1, lambda p: p[0].mul_(1 + 1e-6)))
    failed = agent.train()
    assert isinstance(failed, events.AuditFailed)
    assert failed.difference == (
        f"at step 1, in epoch 1 on partition {agent.order[0]} (worker 0): parameter '7.bias'"
    )
    assert not agent.shards.knows(0, 1), "nothing of the sub-epoch is published"
    assert isinstance(agent.train(1, uncut=True), events.SubEpochDone)


def test_an_engine_that_breaks_is_not_caught_without_audits(
    trained: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(trained, tmp_path, share=0.0)
    agent.budget.trained = 1e6
    monkeypatch.setattr(sub_epoch.SubEpoch, "update", broken_from(1, lambda p: p[0].mul_(1 + 1e-6)))
    done = agent.train()
    assert isinstance(done, events.SubEpochDone)
    assert done.digests != agent.known(1)
    assert (done.audit_seconds, len(agent.built)) == (0.0, 1)


def test_a_break_in_the_last_step_is_caught_after_it_was_published(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = ROWS // BATCH - 1
    is_due = agent.audits.is_due
    monkeypatch.setattr(
        agent.audits, "is_due", lambda run: run.begun_windows == last and is_due(run)
    )
    monkeypatch.setattr("cerebro_hydra.agent.visits.RESIDENT_UNIT_SECONDS", 0.0)
    monkeypatch.setattr(sub_epoch.SubEpoch, "update", broken_from(last, lambda p: p[0].mul_(1.5)))
    failed = agent.train()
    assert isinstance(failed, events.AuditFailed)
    assert f"at step {last}," in failed.difference
    assert not agent.shards.knows(0, 1)


def test_audits_wait_until_training_has_taken_long_enough(agent: Agent) -> None:
    agent.budget.trained = 0.0
    assert agent.train().audit_seconds == 0.0
    assert agent.budget.trained > 0.0
    assert len(agent.built) == 1


def test_the_copy_of_an_audit_counts_against_the_memory_budget(tmp_path: Path) -> None:
    pool = BufferPool()
    store = SegmentStore(100, str(tmp_path), pool)
    kept = store.allocate(60)
    assert store.has_room(40) and not store.has_room(41)
    del kept
    assert store.has_room(100)


def test_a_factory_that_fails_the_second_time_ends_no_trial(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.evaluate(0)

    def fails(params: Any) -> Recipe:
        raise OSError("the hub is gone")

    agent.builder._factory = fails
    assert agent.train().digests == agent.known(1)
    assert "the hub is gone" in caplog.text


def test_a_factory_that_gives_one_model_twice_is_not_audited(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    model = recipe().model

    def gives_it(params: Any) -> Recipe:
        model[7] = nn.Linear(16, 3)  # the optimizer of an earlier recipe knows nothing of it
        return recipe_of(model)

    agent.builder._factory = gives_it
    for visit in (1, 2):
        assert agent.train(visit).digests == agent.known(visit)
    assert "gives the same model twice" in caplog.text


def test_no_memory_stays_after_an_audit(agent: Agent) -> None:
    agent.budget.share = 0.0
    agent.train(1)
    without = agent.memory.pool.leased
    agent.budget.share = 0.01
    agent.train(2)
    assert agent.reported[-1].audit_seconds > 0
    agent.shards.withdraw(0, 1)
    assert agent.memory.pool.leased <= without


def test_a_copy_that_finds_no_memory_lets_the_first_step_be_audited_in_files(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_copies(monkeypatch, MemoryError("no memory"))
    done = agent.train()
    assert done.digests == agent.known(1)
    assert done.audit_seconds > 0
    assert "for want of room for a copy: no memory" in caplog.text


def test_evaluation_of_an_uncut_trial_is_that_of_its_shards(agent: Agent) -> None:
    agent.train(1)
    shards, whole = agent.evaluate(1), agent.evaluate(1, uncut=True)
    assert isinstance(whole, events.EvaluationDone), whole
    assert (whole.sums, whole.states) == (shards.sums, shards.states)
