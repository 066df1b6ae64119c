"""Recipes that admission refuses, each with what is wrong and what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from tests.shards import zoo
from tests.shards.cut.cut_recipes import seeded
from tests.shards.engine.test_shards_equivalence import mlp_recipe, two_sub_epochs
from tests.shards.hopping import start


def test_a_forward_that_does_not_fit_is_the_users_error_with_shapes():
    batch = zoo.vectors(8, features=7)
    with pytest.raises(ConfigurationError, match=r"forward failed.*float32\[8, 7\].*int64\[8\]"):
        start(mlp_recipe()(), [batch])


def test_a_column_of_another_type_is_told_to_be_cast():
    with pytest.raises(ConfigurationError, match=r"float32\[8, 6\].*BFloat16; cast the columns"):
        start(mlp_recipe(model=lambda: zoo.mlp().bfloat16())(), two_sub_epochs()[0])


def test_a_loss_that_fails_is_the_users_error_with_its_message():
    def loss(outputs, labels):
        raise KeyError("no such label")

    with pytest.raises(ConfigurationError, match=r"the loss failed.*no such label'; correct it"):
        start(seeded(zoo.mlp, loss=loss)(), two_sub_epochs()[0])


class Restless(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        Restless.calls += 1
        return self.a(x) * Restless.calls


def test_a_model_that_can_never_be_repeated_is_refused():
    with pytest.raises(ConfigurationError, match="can't be trained reproducibly") as refused:
        start(seeded(Restless)(), two_sub_epochs()[0])
    assert str(refused.value).count("; ") == 1, "it ends after its remedy"
    assert [note.partition(":")[0] for note in refused.value.__notes__] == ["as one shard"]


def test_optimizer_state_that_is_no_tensor_is_refused_by_name():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                self.state[p]["steps"] = 1

    model = zoo.mlp()
    recipe = Recipe(model, Counting(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), shards=2)
    with pytest.raises(ConfigurationError, match=r"Counting keeps 'steps' of .*'0\.weight'"):
        start(recipe, two_sub_epochs()[0])
