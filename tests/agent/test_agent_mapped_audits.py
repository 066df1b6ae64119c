"""Where an agent's memory has no room for a second state, audits are made in mapped files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cerebro_hydra.plan.messages import events
from cerebro_hydra.shards.engine import graph_tasks, sub_epoch
from cerebro_hydra.shards.engine.uncut import UncutTraining
from cerebro_hydra.shards.mapped_memory import LEAST_MAPPED
from tests.agent.lone_agent import Agent
from tests.agent.queues.many_shards import BLOCKS, trained_many
from tests.agent.test_agent_auditor import broken_from

WIDTH = 320  # what a shard trains is worth a file of its own, and spilling


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Make an agent whose budget has room for what trains, but not for a second state."""
    agents = []

    def make(cut: str, everything: bool = False) -> Agent:
        trained, factory = trained_many(cut, everything, WIDTH)
        agent = Agent(trained, tmp_path, share=0.01, make=factory)
        agents.append(agent)
        agent.budget.trained = 1e6
        assert len(agent.builder.get(0).runtime.layout.shards) == BLOCKS + 1
        give_memory(agent, first=True)
        return agent

    yield make
    for agent in agents:
        agent.close()


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
    in_memory, step, allocate = [], UncutTraining.step, agent.memory.allocate
    allocated: list[int] = []  # since the step that is audited

    def counted(nbytes: int) -> Any:
        allocated.append(nbytes)
        return allocate(nbytes)

    monkeypatch.setattr(agent.memory, "allocate", counted)

    def watched(self: Any, window: Any) -> Any:
        losses = step(self, window)
        trained = [p for p in agent.built[-1].model.parameters() if p.requires_grad]
        tensors = [*trained, *(p.grad for p in trained if p.grad is not None)]
        large = [t for t in tensors if t.nbytes >= LEAST_MAPPED]
        assert large
        in_memory.append(sum(not lies_in_a_file(tensor) for tensor in large))
        allocated.clear()
        return losses

    monkeypatch.setattr(UncutTraining, "step", watched)
    for visit in (1, 2):
        agent.shards.withdraw(0, visit - 2)
        give_memory(agent, first=visit == 1)
        done = agent.train(visit)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == agent.known(visit)
        assert done.audit_seconds > 0, caplog.text
        assert allocated == [], "what the audit has made is not written to memory"
    assert in_memory == [0, 0], "each audit was of one step, and of none of it in memory"
    assert agent.memory.pool.peak <= agent.memory._budget


def test_a_wrong_update_of_one_shard_is_found(
    made: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = made("modules")
    wrong = broken_from(0, lambda p: p[0].mul_(1 + 1e-6), "4.bias")
    monkeypatch.setattr(sub_epoch.SubEpoch, "update", wrong)
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


def give_memory(agent: Agent, first: bool) -> None:
    """Give what training needs for itself, and half a state."""
    layout = agent.builder.get(0).runtime.layout
    agent.memory._budget = int(1.5 * layout.nbytes) + layout.step_bytes(first)


def lies_in_a_file(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is mapped from a file without a name."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            return "cerebro-hydra-" in line and line.endswith("(deleted)")
    return False
