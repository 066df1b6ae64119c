"""What a recipe holds comes to the device that trains it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.placement import Placement, copy_model, stays_on_host
from tests.recipe.small_recipes import recipe_of

META = torch.device("meta")


class Holds(nn.Module):
    """Holds tensors in every way but as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("made", torch.ones(3), persistent=False)
        self.child = nn.Module()
        self.child.register_buffer("tied", self.kept)
        self.same: Any = self.kept
        self.deep: Any = {"list": [torch.ones(2), (torch.zeros(1), "text")]}
        self.deep["itself"] = self.deep
        self.repeated = torch.zeros(1, 4).expand(5, 4)


def test_tensors_of_a_module_are_moved_and_stay_one_where_they_were_one() -> None:
    module = Holds()
    deep = module.deep
    Placement(META).place_module(module)
    assert module.made.device == module.kept.device == META
    assert module.child.tied is module.same is module.kept
    assert module.deep is deep is deep["itself"]
    first, (second, text) = deep["list"]
    assert first.device == second.device == META
    assert text == "text"
    assert module.repeated.device == META
    assert module.repeated.shape == (5, 4)
    assert module.repeated.stride(0) == 0, "it takes no more memory there"


def test_optimizers_go_on_with_counts_of_steps_on_the_host() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    Placement(META).place_optimizer(optimizer)
    state = optimizer.state[parameter]
    assert state["step"].device == torch.device("cpu")
    assert state["exp_avg"].device == state["exp_avg_sq"].device == META
    assert not stays_on_host({"fused": True}, "step")
    assert not stays_on_host({"capturable": True}, "step")


def test_a_forward_that_makes_tensors_on_the_cpu_is_told_what_to_write() -> None:
    recipe = recipe_of()
    recipe.device = META
    with pytest.raises(ConfigurationError, match=r"as in torch.arange\(n, device=x.device\)"):  # noqa: SIM117
        with recipe.precision():
            torch.ones(3, device=META) + torch.arange(3)
    with pytest.raises(RuntimeError, match="size"), recipe.precision():
        torch.ones(2) @ torch.ones(3)


def test_an_average_on_the_host_of_what_a_replay_averages_elsewhere_is_refused() -> None:
    recipe = recipe_of(nn.Linear(2, 2), optimizer_on="host", ema=0.9)
    assert recipe.to(torch.device("cpu")) is recipe
    with pytest.raises(ConfigurationError, match=r"optimizer_on is 'host' and ema is 0\.9"):
        recipe.to(META)


class Missing:
    """Stands for nothing."""


UNSET, MISSING = object(), Missing()


class Awaits(nn.Linear):
    """Compares what it holds with what stands for nothing, by identity."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.held, self.others = UNSET, {"all": [UNSET], "missing": [MISSING]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.held is self.others["all"][0] is UNSET
        assert self.others["missing"][0] is MISSING
        return super().forward(x)


def test_an_object_that_has_nothing_yet_and_no_name_is_copied() -> None:
    model = Awaits()
    model.others["bag"] = [Missing()]
    assert copy_model(model).others["bag"][0] is not model.others["bag"][0]


def test_what_stands_for_nothing_does_so_in_a_copy_of_a_model() -> None:
    copy_model(Awaits())(torch.ones(1, 2))
    assert object not in copy._deepcopy_dispatch, "copies of others are as they were"
