"""Labels are given to losses as these take them, and what no loss takes is told in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe

FEATURES = torch.linspace(-1, 1, 12).reshape(6, 2)


def recipe(loss: Any, outputs: int = 1, features: tuple[str, ...] = ("features",)) -> Recipe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, outputs), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, loss).bind(Columns(features, ("label",)))


def loss_of(made: Recipe, labels: Tensor) -> Tensor:
    return made.compute_loss(made.model(FEATURES), (labels,))


@pytest.mark.parametrize(
    "loss",
    [
        nn.BCELoss(),
        nn.BCEWithLogitsLoss(),
        nn.functional.binary_cross_entropy,
        nn.functional.binary_cross_entropy_with_logits,
    ],
)
def test_whole_labels_become_floats_for_losses_of_likelihood(loss: Any) -> None:
    labels = torch.tensor([[0], [1], [1], [0], [1], [0]])
    made = recipe(loss)
    assert torch.equal(loss_of(made, labels), loss_of(made, labels.float()))


def test_a_class_without_an_output_is_named_with_the_outputs() -> None:
    said = "label 3 is no class of a model with 3 outputs, whose classes are 0 to 2; give"
    with pytest.raises(ConfigurationError, match=said):
        loss_of(recipe(nn.CrossEntropyLoss(), 3), torch.tensor([0, 1, 2, 3, 1, 0]))
    ignored = torch.tensor([0, 1, 2, -100, 1, 0])
    assert loss_of(recipe(nn.CrossEntropyLoss(), 3), ignored).isfinite()


def test_a_class_in_place_of_a_loss_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"the class BCELoss; give an instance: BCELoss"):
        recipe(nn.BCELoss)


def test_more_columns_than_forward_takes_are_refused_before_a_batch() -> None:
    said = r"3 feature columns \['a', 'b', 'c'\], and Sequential.forward takes .'input'.; as"
    with pytest.raises(ConfigurationError, match=said):
        recipe(nn.MSELoss(), features=("a", "b", "c"))
