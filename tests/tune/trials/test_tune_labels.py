"""Labels of losses that index classes: whole numbers of any type, or a probability per class."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe


def recipe(loss: nn.Module) -> Recipe:
    model = nn.Linear(4, 3)
    return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, ["accuracy"])


def test_float_class_numbers_count_as_integers() -> None:
    outputs = torch.randn(5, 3)
    numbers = torch.tensor([0, 2, 1, 1, 0])
    for loss in (nn.CrossEntropyLoss(), nn.NLLLoss(), nn.MultiMarginLoss()):
        got = recipe(loss).compute_loss(outputs, [numbers.to(torch.float32)])
        assert torch.equal(got, loss(outputs, numbers))


def test_labels_between_two_classes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"label 0.5 is no class number"):
        recipe(nn.CrossEntropyLoss()).compute_loss(torch.randn(2, 3), [torch.tensor([1.0, 0.5])])


def test_probabilities_per_class_reach_cross_entropy_as_they_are() -> None:
    outputs, loss = torch.randn(5, 3), nn.CrossEntropyLoss()
    soft = torch.softmax(torch.randn(5, 3), 1)
    assert torch.equal(recipe(loss).compute_loss(outputs, [soft]), loss(outputs, soft))
