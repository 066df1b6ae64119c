"""An agent trains and audits a trial whose training step steps its optimizers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore
from tests.agent.lone_agent import BATCH, COLUMNS, Agent, train_without_agent
from tests.recipe import gans
from tests.shards import zoo
from tests.shards.hopping import start

happens = [False]


def gan() -> Recipe:
    return gans.gan({}, features=6, batch_size=BATCH, ema=0.9).bind(COLUMNS)


class Late:
    """Counts from the moment on when something happens."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, model: Any, batch: Any, optimizers: Any) -> Any:
        self.count += happens[0]
        return gans.train_gan(model, batch, optimizers)


def late() -> Recipe:
    made = gans.gan({}, features=6, batch_size=BATCH, training_step=Late())
    return made.bind(COLUMNS)


@pytest.mark.parametrize("device", [None, 2])
def test_states_are_those_of_plain_training_and_audits_agree(
    tmp_path: Path, make_agent: Callable[..., Agent], device: float | None
) -> None:
    trained = train_without_agent(LocalStore(str(tmp_path / "store")), gan)
    agent = make_agent(trained, make=gan, device=device)
    for state in (1, 2):
        done = agent.train(state)
        assert isinstance(done, events.SubEpochDone), done
        assert done.digests == agent.known(state)
        assert done.audit_seconds > 0
    assert isinstance(agent.evaluate(2), events.EvaluationDone)


def test_what_its_step_keeps_later_fails_the_trial_by_name(
    tmp_path: Path, make_agent: Callable[..., Agent]
) -> None:
    happens[0] = False
    trained = train_without_agent(LocalStore(str(tmp_path / "store")), late)
    agent = make_agent(trained, make=late, share=0.0001)
    happens[0] = True
    failed = agent.train()
    assert isinstance(failed, events.TaskFailed)
    assert "a value of the training_step at .count" in failed.error


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))


class LowAfterFour:
    """Has another attribute from the fifth step on, which the first ones don't reach."""

    def __call__(self, model: Any, batch: Any, optimizers: Any) -> Tensor:
        features, labels = batch
        model.steps += 1
        if model.steps > 4:
            self.low = True
        optimizers[0].zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        loss.backward()
        optimizers[0].step()
        return loss


def test_further_steps_of_admission_leave_no_mark_of_what_they_change() -> None:
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step, loss = LowAfterFour(), nn.CrossEntropyLoss()
    recipe = Recipe(model, optimizer, loss, batch_size=8, training_step=step).bind(COLUMNS)
    trial = start(recipe, zoo.singly(zoo.vectors(8, 8)))
    assert not hasattr(step, "low")
    assert not [mark for mark in trial.admission.attributes if "training_step" in mark]
