"""Recipes that train alike but for their LR schedules have one key, and all others have others.

What a schedule gives each epoch has a digest of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import training_key


def recipe(**changes: Any) -> Recipe:
    """Return a new one, of the same seed."""
    torch.manual_seed(changes.pop("seed", 0))
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(changes.pop("dropout", 0.1)), nn.Linear(8, 2)
    )
    if (scale := changes.pop("scale", None)) is not None:
        nn.init.normal_(model[0].weight, std=scale)
    margin = changes.pop("margin", 1.0)
    settings = {"lr": 0.1, "momentum": 0.9, **changes.pop("optimizer", {})}
    given = {
        "loss": lambda outputs, labels: nn.functional.cross_entropy(outputs * margin, labels),
        "batch_size": 8,
        **changes,
    }
    return Recipe(model=model, optimizer=torch.optim.SGD(model.parameters(), **settings), **given)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr_scheduler": partial(StepLR, step_size=3)},
        {"lr_scheduler": lambda optimizer: ExponentialLR(optimizer, 0.5), "lr_interval": "epoch"},
        {"lr_scheduler": ReduceLROnPlateau},
    ],
)
def test_schedules_are_not_in_the_key(changes: dict[str, Any]) -> None:
    assert training_key(recipe(**changes)) == training_key(recipe())


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2},
        {"seed": 1},
        {"scale": 0.5},
        {"margin": 2.0},
        {"batch_size": 16},
        {"accumulate": 2},
        {"clip_grad_norm": 1.0},
        {"ema": 0.9},
        {"autocast": "float16"},
        {"early_stopping": 2},
        {"shards": 2},
        {"optimizer": {"nesterov": True}},
        {"optimizer": {"momentum": 0.5}},
        {"collate": lambda batch, training: batch},
        {"warm_start": {"0.weight": torch.ones(8, 4)}},
    ],
)
def test_all_else_is_in_the_key(changes: dict[str, Any]) -> None:
    assert training_key(recipe(**changes)) != training_key(recipe())


def test_the_scale_of_losses_is_in_the_key() -> None:
    keys = [
        training_key(recipe(autocast="float16", grad_scaler=torch.amp.GradScaler("cpu", each)))
        for each in (1.0, 1.0, 2.0)
    ]
    assert keys[0] is not None and keys[0] == keys[1] != keys[2]


def options(make: Callable[..., Any] | None, interval: str = "step", **optimizer: Any) -> Any:
    built = recipe(lr_scheduler=make, lr_interval=interval, optimizer=optimizer)
    return built.lr_schedule.of_epochs(built.optimizer, steps_per_epoch=4, epochs=3)


def test_epochs_with_the_same_options_in_each_step_have_the_same_digest() -> None:
    def falls(after: int) -> Callable[..., Any]:
        return lambda optimizer: StepLR(optimizer, after, gamma=0.1)

    one, other, third = options(falls(4)), options(falls(9)), options(falls(5))
    assert one[0] == other[0] == third[0]
    assert other[1] != one[1] != third[1] != other[1], "a step in the midst of an epoch counts"
    by_epoch = [options(falls(after), "epoch") for after in (1, 2, 3)]
    assert [len(set(each)) for each in by_epoch] == [3, 2, 1]
    assert by_epoch[1][:2] == by_epoch[2][:2] and by_epoch[0][:1] == by_epoch[1][:1]
    assert len(set(options(None))) == 1


@pytest.mark.parametrize("changes", [{"lr": 0.2}, {"momentum": 0.8}, {"weight_decay": 1e-4}])
def test_options_of_the_optimizer_are_in_every_digest(changes: dict[str, Any]) -> None:
    assert not set(options(None, **changes)) & set(options(None))


def test_nobody_knows_beforehand_what_a_metric_decides() -> None:
    assert options(ReduceLROnPlateau) is None
