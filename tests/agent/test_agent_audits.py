"""An agent audits its steps, with real trials, in each place where it may train them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cerebro_hydra.agent.memory.shard_store import Shard
from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.engine import graph_tasks, sub_epoch
from cerebro_hydra.shards.engine.uncut import UncutTraining
from cerebro_hydra.shards.mapped_memory import LEAST_MAPPED
from tests.agent.lone_agent import BATCH, BLOCKS, MEMORY, ROWS, Agent, recipe, recipe_of

Make = Callable[..., Agent]

WIDE = 320  # what a shard trains is worth a file of its own, and spilling


@contextmanager
def little_memory(agent: Agent, first: bool) -> Iterator[int]:
    """Leave what training needs for itself, and half a state: audits are made in mapped files."""
    layout = agent.builder.get(0).runtime.layout
    nbytes = int(1.5 * layout.nbytes) + layout.step_bytes(first)
    with agent.memory.reserved(MEMORY - nbytes):
        yield nbytes


@pytest.mark.parametrize("uncut", [False, True])
@pytest.mark.parametrize(
    ("cut", "everything", "device"),
    [
        ("modules", False, None),
        ("modules", True, None),
        ("export", True, None),
        ("modules", True, 0.4),
        ("export", True, 0.4),
        ("modules", False, 2),
    ],
)
def test_audits_agree_and_change_no_bit(
    make_agent: Make,
    cut: str,
    everything: bool,
    device: float | None,
    uncut: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    agent = make_agent(cut, everything, device=device)
    for state in (1, 2):
        done = agent.train(state, uncut)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == agent.known(state)
        assert done.audit_seconds > 0, caplog.text
    assert set(agent.begun) == {1, 2}
    assert len(agent.built) == 3, "the factory builds the trial, and a model for each audit"


@pytest.mark.parametrize(
    ("cut", "everything"), [("modules", False), ("modules", True), ("export", True)]
)
def test_audits_agree_in_mapped_files_where_memory_has_no_room_for_a_second_state(
    make_agent: Make,
    cut: str,
    everything: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = make_agent(cut, everything, WIDE)
    assert len(agent.builder.get(0).runtime.layout.shards) == BLOCKS + 1
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
    for state in (1, 2):
        agent.shards.withdraw(0, state - 2)
        with little_memory(agent, first=state == 1) as nbytes:
            done = agent.train(state)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == agent.known(state)
        assert done.audit_seconds > 0, caplog.text
        assert allocated == [], "what the audit has made is not written to memory"
        assert agent.memory.pool.peak <= nbytes
    assert in_memory == [0, 0], "each audit was of one step, and of none of it in memory"


def lies_in_a_file(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory is mapped from a file without a name."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            return "cerebro-hydra-" in line and line.endswith("(deleted)")
    return False


# ---------------------------------------------------------------------- what differs


def broken_from(
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    change: Callable[[torch.Tensor], object] = lambda p: p[0].mul_(1 + 1e-6),
    parameter: str = "7.bias",
) -> None:
    """Let the engine's update change a parameter after each step from this one on."""
    update = sub_epoch.SubEpoch.update

    def wrong(self: Any, k: int) -> None:
        update(self, k)
        self._marks.pop(k, None)  # else it is found as what the trial's code writes
        self._samples.pop(k, None)
        if self.step >= step and parameter in self._states[k].params:
            with torch.no_grad():
                change(self._states[k].params[parameter])

    monkeypatch.setattr(sub_epoch.SubEpoch, "update", wrong)


def check_found(agent: Agent, failed: Any, difference: str, step: str | int = r"\d+") -> None:
    """Check what was told of a first sub-epoch, after which its trial is trained uncut."""
    assert isinstance(failed, events.AuditFailed), failed
    where = rf"at step {step}, in epoch 1 on partition {agent.order[0]} \(worker 0\): "
    assert re.fullmatch(where + difference, failed.difference), failed.difference
    assert not agent.shards.knows(0, 1), "nothing of the sub-epoch is published"
    assert agent.train(1, uncut=True).digests == agent.known(1)


@pytest.mark.parametrize(("device", "mapped"), [(None, False), (None, True), (2, False)])
def test_a_wrong_update_of_one_shard_is_found_and_the_plain_model_trains_on(
    make_agent: Make, device: float | None, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent("modules", False, WIDE, device=device)
    broken_from(monkeypatch, 0, parameter="4.bias")
    with little_memory(agent, first=True) if mapped else agent.memory.reserved(0):
        failed = agent.train()
    check_found(agent, failed, r"parameter '4\.bias'", 0 if mapped else r"\d+")


@pytest.mark.parametrize(("device", "mapped"), [(None, True), (0.4, False)])
def test_a_graph_that_differs_from_its_modules_is_found(
    make_agent: Make, device: float | None, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent("export", True, WIDE, device=device)
    forward = graph_tasks.GraphTasks.forward

    def wrong(self: Any, k: int, going: Any) -> None:
        forward(self, k, going)
        if k == 2:
            going.values |= {name: value * 1.5 for name, value in going.values.items()}

    monkeypatch.setattr(graph_tasks.GraphTasks, "forward", wrong)
    with little_memory(agent, first=True) if mapped else agent.memory.reserved(0):
        failed = agent.train()
    check_found(agent, failed, "the loss is .*")


@pytest.mark.parametrize("device", [None, 2])
@pytest.mark.parametrize("step", [0, 5, ROWS // BATCH - 1])
def test_the_step_that_is_drawn_is_audited_and_the_last_one_after_it_was_published(
    make_agent: Make, step: int, device: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent("modules", width=WIDE, device=device)
    monkeypatch.setattr("cerebro_hydra.agent.audits.drawn_window", lambda *_: step)
    broken_from(monkeypatch, step, lambda p: p[0].mul_(1.5), "14.bias")
    check_found(agent, agent.train(), r"parameter '14\.bias'", step)


def test_an_engine_that_breaks_is_not_caught_without_audits(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.audits.budget.share = 0.0
    broken_from(monkeypatch, 1)
    done = agent.train()
    assert isinstance(done, events.SubEpochDone)
    assert done.digests != agent.known(1)
    assert (done.audit_seconds, len(agent.built)) == (0.0, 1)


def test_shards_of_different_states_are_not_trained_uncut(make_agent: Make) -> None:
    agent = make_agent("modules", share=0.0)
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


# ---------------------------------------------------------------------- what audits leave alone


def test_an_audit_leaves_all_random_numbers_as_they_are(agent: Agent) -> None:
    drawn: list[Any] = []
    agent.train()
    for share in (0.01, 0.0):
        agent.audits.budget.share = share
        torch.manual_seed(5)
        random.seed(7)
        np.random.seed(7)
        agent.train(2)
        drawn.append((random.random(), np.random.rand(), torch.rand(())))
    assert drawn[0] == drawn[1]
    assert len(agent.built) == 3


def test_audits_wait_until_training_has_taken_long_enough(agent: Agent) -> None:
    agent.audits.budget.trained = 0.0
    assert agent.train().audit_seconds == 0.0
    assert agent.audits.budget.trained > 0.0
    assert len(agent.built) == 1


@pytest.mark.parametrize("device", [None, 2])
def test_an_audit_for_which_time_has_become_short_is_not_made(
    make_agent: Make, device: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent("modules", device=device)
    monkeypatch.setattr("cerebro_hydra.agent.audits.drawn_window", lambda *_: 5)
    choose = agent.audits.choose

    def chosen(*args: Any) -> None:
        choose(*args)
        agent.audits.budget.spent = 1e9  # as if the audit of another trial had lasted long

    monkeypatch.setattr(agent.audits, "choose", chosen)
    done = agent.train()
    assert (done.digests, done.audit_seconds) == (agent.known(1), 0.0)
    assert len(agent.built) == 2, "its model was built for nothing"


def test_a_factory_that_fails_the_second_time_ends_no_trial_and_is_told_once(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent.evaluate(0)

    def fails() -> Recipe:
        raise OSError("the hub is gone")

    agent.make = fails
    for state in (1, 2):
        assert agent.train(state).digests == agent.known(state)
    assert caplog.text.count("is no longer audited on worker 0: OSError: the hub is gone") == 1


def test_a_factory_that_gives_one_model_twice_is_not_audited(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    model = recipe().model

    def gives_it() -> Recipe:
        model[7] = nn.Linear(16, 3)  # the optimizer of an earlier recipe knows nothing of it
        return recipe_of(model)

    agent.make = gives_it
    for state in (1, 2):
        assert agent.train(state).digests == agent.known(state)
    assert "gives the same model twice" in caplog.text


def test_no_memory_stays_after_an_audit(agent: Agent) -> None:
    agent.audits.budget.share = 0.0
    agent.train(1)
    without = agent.memory.pool.leased
    agent.audits.budget.share = 0.01
    assert agent.train(2).audit_seconds > 0
    agent.shards.withdraw(0, 1)
    assert agent.memory.pool.leased <= without


def test_evaluation_of_an_uncut_trial_is_that_of_its_shards(agent: Agent) -> None:
    agent.train(1)
    shards, whole = agent.evaluate(1), agent.evaluate(1, uncut=True)
    assert isinstance(whole, events.EvaluationDone), whole
    assert (whole.sums, whole.states) == (shards.sums, shards.states)
