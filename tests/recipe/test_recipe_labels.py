"""Labels are given to losses as these take them, and what no loss takes is told in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from tests.recipe.small_recipes import recipe_of

FEATURES = torch.linspace(-1, 1, 12).reshape(6, 2)


def recipe(loss: Any, outputs: int = 1, features: tuple[str, ...] = ("features",)) -> Recipe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, outputs), nn.Sigmoid())
    return recipe_of(model, loss).bind(Columns(features, ("label",)))


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


def test_classes_as_floats_or_booleans_count_as_integers_and_shares_stay_as_they_are() -> None:
    outputs, numbers = torch.randn(6, 3), torch.tensor([0, 2, 1, 1, 0, 2])
    for loss in (nn.CrossEntropyLoss(), nn.NLLLoss(), nn.MultiMarginLoss()):
        got = recipe(loss, 3).compute_loss(outputs, [numbers.float()])
        assert torch.equal(got, loss(outputs, numbers))
        got = recipe(loss, 3).compute_loss(outputs, [numbers > 1])
        assert torch.equal(got, loss(outputs, (numbers > 1).long()))
    loss, shares = nn.CrossEntropyLoss(), torch.softmax(torch.randn(6, 3), 1)
    assert torch.equal(recipe(loss, 3).compute_loss(outputs, [shares]), loss(outputs, shares))


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 1, 2, 3, 1, 0], "label 3 is no class of a model with 3 outputs, whose classes are 0"),
        ([0.0, 1.0, 2.0, 0.5, 1.0, 0.0], "label 0.5 is no class number"),
    ],
)
def test_a_class_without_an_output_is_named_with_the_outputs(labels: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        loss_of(recipe(nn.CrossEntropyLoss(), 3), torch.tensor(labels))
    ignored = torch.tensor([0, 1, 2, -100, 1, 0])
    assert loss_of(recipe(nn.CrossEntropyLoss(), 3), ignored).isfinite()


@pytest.mark.parametrize(
    ("loss", "features", "said"),
    [
        (nn.BCELoss, ("features",), r"the class BCELoss; give an instance: BCELoss"),
        (
            nn.MSELoss(),
            ("a", "b", "c"),
            r"3 feature columns \['a', 'b', 'c'\], and Sequential.forward takes .'input'.; as",
        ),
    ],
)
def test_losses_and_columns_that_no_batch_could_use_are_refused(
    loss: Any, features: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        recipe(loss, features=features)
