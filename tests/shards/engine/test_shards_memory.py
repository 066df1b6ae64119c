"""The engine lets go of segments when it returns, not when Python next looks for circles."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from cerebro_hydra.agent.memory.pool import BufferPool
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import NonFiniteLoss
from tests.shards import zoo
from tests.shards.engine.test_shards_equivalence import mlp_recipe, two_sub_epochs
from tests.shards.hopping import start


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class Circular(torch.optim.SGD):
    """Refers to itself, as some schedulers and wrappers make their optimizers do."""

    def step(self, closure=None):
        self.me = self
        return super().step(closure)


def circular(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Circular(model.parameters(), lr=0.1, momentum=0.9)


def leasing(trial, pool: BufferPool) -> Callable:
    """Return a `need` that gives the engine leased memory, as an agent does."""

    def need(k: int):
        segments, cursor = trial.need(k)
        leased = {}
        for name, content in segments.items():
            leased[name] = pool.lease(content.nbytes)
            leased[name][:] = content
        return leased, cursor

    return need


RULES = [
    pytest.param({"shards": 1}, id="whole"),
    pytest.param({"shards": 3, "clip_grad_norm": 1.0, "ema": 0.9}, id="cut"),
    pytest.param({"shards": 3, "lr_scheduler": schedule}, id="scheduler"),
    pytest.param({"shards": 2, "optimizer": circular}, id="circle"),
]


@pytest.mark.parametrize("rules", RULES)
def test_nothing_refers_to_a_segment_after_training_and_evaluation(rules) -> None:
    trial = start(mlp_recipe(**rules)(), two_sub_epochs()[0])
    pool = BufferPool(poison=True)
    need = leasing(trial, pool)
    for windows in two_sub_epochs():
        totals = trial.engine().train(windows, trial.step, need, trial.publish)
        trial.step += totals.steps
        assert pool.leased == 0
    trial.engine().evaluate(zoo.vectors(8, 5), need)
    assert pool.leased == 0


@pytest.mark.parametrize("rules", RULES)
def test_nothing_refers_to_a_segment_after_a_trial_has_failed(rules) -> None:
    trial = start(mlp_recipe(**rules)(), two_sub_epochs()[0])
    pool = BufferPool(poison=True)
    need = leasing(trial, pool)
    (first,), *_ = two_sub_epochs()[0]
    broken = Batch((first.features[0] * math.nan,), first.labels, first.rows)
    train = partial(trial.engine().train, [[first], [broken]], 0, need, trial.publish)
    try:
        train()
    except NonFiniteLoss:
        pass
    else:
        pytest.fail("the loss is NaN, and nothing was raised")
    assert pool.leased == 0
