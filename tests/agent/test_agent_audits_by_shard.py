"""Where memory has no room for a second state, an agent audits shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.agent.audits import memory_of_step
from cerebro_hydra.agent.device.runs import PlainRun
from cerebro_hydra.plan.messages import events
from cerebro_hydra.plan.schedules.graph import TaskGraph
from cerebro_hydra.shards.engine import graph_tasks, sub_epoch
from cerebro_hydra.shards.engine.layout import Bytes, aligned, on_host
from cerebro_hydra.shards.engine.shard_run import ShardRun
from cerebro_hydra.storage.digest import digest
from tests.agent.lone_agent import Agent
from tests.agent.queues.many_shards import BLOCKS, WIDTH, trained_many
from tests.agent.test_agent_auditor import broken_from


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Agent]:
    """Make an agent whose budget has room for a second copy of some shards, but not of all."""

    def make(cut: str, everything: bool = False) -> Agent:
        trained, factory = trained_many(cut, everything)
        agent = Agent(trained, tmp_path, share=0.01, make=factory)
        agent.budget.trained = 1e6
        layout = agent.builder.get(0).layout
        assert len(layout.shards) == BLOCKS + 1
        spare = memory_of_step(layout)
        assert spare < layout.nbytes / 2
        agent.memory._budget = 2 * layout.nbytes + layout.step_bytes(first=True) + spare
        return agent

    return make


@pytest.mark.parametrize(
    ("cut", "everything"), [("modules", False), ("modules", True), ("export", True)]
)
def test_the_first_step_of_each_sub_epoch_agrees_and_no_bit_changes(
    made: Callable[..., Agent],
    cut: str,
    everything: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = made(cut, everything)
    present, perform = [], ShardRun.perform

    def watched(self: Any, *args: Any) -> None:
        perform(self, *args)
        model = agent.built[-1].model
        present.append(sum(p.nbytes for p in model.parameters() if 0 not in p.stride()))

    monkeypatch.setattr(ShardRun, "perform", watched)
    for visit in (1, 2):
        agent.shards.withdraw(0, visit - 2)
        done = agent.train(visit)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == agent.known(visit)
        assert done.audit_seconds > 0, caplog.text
    assert len(present) > 2 * (BLOCKS + 1), "it was taken by shard"
    largest = 4 * (WIDTH * (WIDTH + 1) + 3 * (WIDTH + 1))
    assert max(present) == largest, "one shard at a time"
    assert agent.memory.pool.peak <= agent.memory._budget


def test_a_wrong_update_of_one_shard_is_found(
    made: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = made("modules")
    wrong = broken_from(0, lambda p: p[0].mul_(1 + 1e-6), "4.bias")
    update = sub_epoch.SubEpoch.update

    def wrong_in_the_engine(self: Any, k: int) -> None:
        (update if self._held is not None else wrong)(self, k)

    monkeypatch.setattr(sub_epoch.SubEpoch, "update", wrong_in_the_engine)
    failed = agent.train()
    assert isinstance(failed, events.AuditFailed)
    assert failed.difference == (
        f"at step 0, in epoch 1 on partition {agent.order[0]} (worker 0): parameter '4.bias'"
    )
    assert not agent.shards.knows(0, 1), "nothing of the sub-epoch is published"
    assert agent.train(1, uncut=True).digests == agent.known(1)


def test_a_graph_that_differs_from_its_modules_is_found(
    made: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = made("export", True)
    forward = graph_tasks.GraphTasks.forward

    def wrong(self: Any, k: int, going: Any) -> None:
        forward(self, k, going)
        if k == 2:
            going.values |= {name: value * 1.5 for name, value in going.values.items()}

    monkeypatch.setattr(graph_tasks.GraphTasks, "forward", wrong)
    failed = agent.train()
    assert isinstance(failed, events.AuditFailed)
    assert "the loss is" in failed.difference


def test_where_memory_has_no_room_for_one_shard_a_line_says_that_nothing_is_audited(
    made: Callable[..., Agent], caplog: pytest.LogCaptureFixture
) -> None:
    agent = made("modules")
    agent.memory._budget -= 2 * memory_of_step(agent.builder.get(0).layout)
    assert agent.train().audit_seconds == 0.0
    assert "no longer audited on worker 0" in caplog.text


def test_the_plain_model_on_a_device_has_the_bits_of_plain_training(
    made: Callable[..., Agent],
) -> None:
    agent = made("modules", True)
    agent.train(1)  # so that state 0 is here
    runtime, shards = agent.builder.get(0), range(BLOCKS + 1)
    held = [agent.shards.wait(0, 0, k).segments for k in shards]
    slots = [{name: aligned_copy(content) for name, (_, content) in each.items()} for each in held]
    cursors: dict[int, Any] = {}
    windows = [*agent.builder.windows(0, 0, agent.order[0])]
    spec = runtime.spec
    run = PlainRun(
        runtime.recipe, runtime.layout, spec.seed, spec.steps_per_epoch, 0, iter(windows), None
    )
    microbatches = sum(map(len, windows))
    assert microbatches % spec.accumulate, "the last window is shorter"
    graph = TaskGraph(len(shards), microbatches, spec.accumulate, barrier=True)
    losses: dict[int, tuple[float, int]] = {}
    for window in range(graph.windows):
        for k in shards:
            run.load(k, on_host(slots[k]), cursors.get(k))
        for task in graph.tasks(0, window):
            losses |= run.perform(task).losses
        for k in shards:
            cursors[k], has_gradients = run.unload(k)
            assert not has_gradients
    assert [rows for _, rows in losses.values()] == [b.rows for w in windows for b in w]
    assert [digest(each["trainable"]) for each in slots] == [b for _, b in agent.known(1)]


def aligned_copy(content: Bytes) -> Bytes:
    copy = aligned(content.nbytes)
    copy[:] = content
    return copy
