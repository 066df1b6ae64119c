"""An estimator of a module with a training step: copies of it train, and it stays as it is."""

from __future__ import annotations

import pytest
import torch

from cerebro_hydra import SparkEstimator
from cerebro_hydra.data.batches import Batch
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, PlainTrainer
from tests.recipe.stepped_modules import Stepped


def test_copies_train_with_copies_of_its_optimizer_and_schedule() -> None:
    module = Stepped()
    estimator = SparkEstimator(module, metrics={"hits": "max"}, batch_size=16)
    assert type(estimator.model) is Stepped
    before = [each.clone() for each in module.state_dict().values()]
    (rate,) = (group["lr"] for group in estimator.optimizer.param_groups)
    recipe = estimator._factory({"batch_size": 8}).bind(Columns(("features",), ("label",)))
    assert recipe.batch_size == 8
    (group,) = recipe.optimizer.param_groups
    assert group["params"][0] is recipe.model.layers[0].weight
    trainer = PlainTrainer(recipe, trial_seed=1, steps_per_epoch=4)
    batch = Batch((torch.randn(8, 16),), (torch.zeros(8, dtype=torch.int64),), 8)
    trainer.train([[batch]])
    assert group["lr"] > rate == estimator.optimizer.param_groups[0]["lr"]
    assert all(map(torch.equal, before, module.state_dict().values()))


def test_numbers_that_its_schedule_has_read_do_not_vary_without_a_factory() -> None:
    with pytest.raises(ConfigurationError, match=r"no Param 'lr'.*from_factory"):
        SparkEstimator(Stepped()).getParam("lr")
