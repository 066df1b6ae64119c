"""What `lr_scheduler=` may be."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.lr_schedule import LRSchedule


def made(make: Any, steps_per_epoch: int = 7) -> Any:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    return LRSchedule(make, "step", "loss").make(optimizer, steps_per_epoch)


@pytest.mark.parametrize(
    "make",
    [
        partial(lrs.ExponentialLR, gamma=0.5),
        lambda optimizer, gamma=0.5: lrs.ExponentialLR(optimizer, gamma),
        lambda optimizer, *, gamma=0.5: lrs.ExponentialLR(optimizer, gamma),
    ],
    ids=["partial", "default", "keyword"],
)
def test_options_with_a_default_keep_it(make):
    assert made(make).gamma == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer, steps: lrs.StepLR(optimizer, steps),
        lambda optimizer, *, steps_per_epoch: lrs.StepLR(optimizer, steps_per_epoch),
        lambda optimizer, gamma=0.5, steps_per_epoch=1: lrs.StepLR(optimizer, steps_per_epoch),
    ],
    ids=["second", "keyword", "with a default"],
)
def test_steps_per_epoch_are_given_to_those_that_ask(make):
    assert made(make).step_size == 7


def test_partial_plateau_and_one_cycle():
    assert made(partial(lrs.ReduceLROnPlateau, patience=2)).patience == 2
    assert made(partial(lrs.OneCycleLR, max_lr=1.0, epochs=3)).total_steps == 21


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda optimizer: 5, "lr_scheduler gave an int"),
        (lambda optimizer: lrs.StepLR(optimizer), "lr_scheduler failed .*step_size"),
        (lrs.StepLR, r"class StepLR, .* lambda optimizer: StepLR\(optimizer, step_size=\.{3}\)$"),
        (lrs.OneCycleLR, r"give lambda optimizer: OneCycleLR\(optimizer, max_lr=\.{3}\)$"),
    ],
)
def test_what_gives_no_scheduler_is_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        made(make)


class Halving(lrs.LambdaLR):
    """A class of the user may take the steps of an epoch second, as a function may."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        super().__init__(optimizer, lambda step: 0.5 ** (step // steps))


@pytest.mark.parametrize("make", [lrs.ReduceLROnPlateau, lrs.LinearLR, Halving])
def test_classes_that_need_the_optimizer_alone_and_classes_of_the_user(make):
    assert isinstance(made(make), make)


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(()).item(), random.random, np.random.rand],
    ids=["torch", "python", "numpy"],
)
@pytest.mark.parametrize("first", [0, 1], ids=["where it is made", "where an epoch begins"])
def test_random_numbers_that_no_replay_draws_again_are_refused(
    draw: Callable[[], float], first: int
) -> None:
    rate = lambda epoch: 1.0 if epoch < first else draw()  # noqa: E731
    schedule = LRSchedule(lambda optimizer: lrs.LambdaLR(optimizer, rate), "epoch", "loss")
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="lr_scheduler draws random numbers where"):
        schedule.begin_epoch(schedule.make(optimizer, 7), {})


def test_random_numbers_of_a_generator_seeded_with_the_epoch_are_let_pass() -> None:
    drawn = lambda epoch: torch.rand((), generator=torch.Generator().manual_seed(epoch)).item()  # noqa: E731
    schedule = LRSchedule(lambda optimizer: lrs.LambdaLR(optimizer, drawn), "epoch", "loss")
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = schedule.make(optimizer, 7)
    schedule.begin_epoch(scheduler, {})
    assert scheduler.get_last_lr() == [drawn(1)]
