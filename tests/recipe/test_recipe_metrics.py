"""States of custom metrics, as a recipe keeps them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe


class Counts:
    """Counts labels in a dict that `start` gives out again and again."""

    def __init__(self, key: Any) -> None:
        self.first: dict[Any, int] = {}
        self.key = key

    def start(self) -> Any:
        return self.first

    def update(self, state: Any, outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        for label in labels.tolist():
            state[self.key(label)] = state.get(self.key(label), 0) + 1
        return state

    def merge(self, state: Any, other: Any) -> Any:
        return state | other

    def compute(self, state: Any) -> float:
        return float(len(state))


def recipe_of(metric: Any) -> Recipe:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), metrics={"m": (metric, "max")})


def test_what_start_gives_is_not_written_into():
    recipe = recipe_of(metric := Counts(str))
    for _ in range(2):
        states: dict[str, Any] = {}
        recipe.update_states(states, torch.zeros(2, 2), (torch.tensor([0, 1]),))
        recipe.update_states(states, torch.zeros(1, 2), (torch.tensor([1]),))
        assert states == {"m": {"0": 1, "1": 2}}
    assert metric.first == {}


def test_a_key_that_is_no_string_is_refused():
    with pytest.raises(ConfigurationError, match=r"metric 'm' .*0 is a key .*keys are strings"):
        recipe_of(Counts(int)).update_states({}, torch.zeros(1, 2), (torch.tensor([0]),))
