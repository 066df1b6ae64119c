"""An agent trains and audits a trial whose training step steps its optimizers itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cerebro_hydra.plan.messages import events
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.storage import LocalStore
from tests.agent.lone_agent import BATCH, COLUMNS, Agent, train_without_agent
from tests.recipe import gans

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
