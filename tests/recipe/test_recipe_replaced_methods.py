"""What training would never call, or what other trials would have too, is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.recipe.build import build_recipe

COLUMNS = Columns(("x",), ("y",))


def recipe_of(
    model: nn.Module, change: Callable[[torch.optim.Optimizer], object] = lambda _: None
) -> Recipe:
    optimizer = torch.optim.AdamW(model.parameters())
    change(optimizer)
    return Recipe(model, optimizer, nn.MSELoss())


def replaced(optimizer: torch.optim.Optimizer) -> None:
    step = optimizer.step

    def clipped(closure: Any = None) -> Any:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        return step(closure)

    optimizer.step = clipped  # type: ignore[method-assign]


def test_a_step_that_was_replaced_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the step of this AdamW was replaced"):
        recipe_of(nn.Linear(3, 1), replaced)


def test_one_replaced_before_a_schedule_wraps_it_is_refused() -> None:
    def both(optimizer: torch.optim.Optimizer) -> None:
        step = type(optimizer).step
        optimizer.step = (lambda self, closure=None: step(self)).__get__(optimizer)  # type: ignore
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    with pytest.raises(ConfigurationError, match="the step of this AdamW was replaced"):
        recipe_of(nn.Linear(3, 1), both)


def test_one_that_a_schedule_of_torch_wraps_is_not() -> None:
    recipe_of(nn.Linear(3, 1), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))


class Keeps(nn.Linear):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def test_a_model_that_keeps_gradients_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Keeps overrides zero_grad"):
        recipe_of(Keeps(3, 1))


@pytest.mark.parametrize(
    "register",
    [
        torch_module.register_module_forward_pre_hook, torch_module.register_module_forward_hook,
        torch_module.register_module_full_backward_hook,
        torch_module.register_module_full_backward_pre_hook,
    ],
)  # fmt: skip
def test_a_factory_that_registers_hooks_for_all_modules_is_refused_and_leaves_none(
    register: Callable[..., Any],
) -> None:
    def factory(params: Mapping[str, Any]) -> Recipe:
        register(lambda *_: None)
        return recipe_of(nn.Linear(3, 1))

    mine = torch_module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ConfigurationError, match="for all modules of the process"):
            build_recipe(factory, {}, 0, COLUMNS)
        assert list(torch_module._global_forward_hooks) == [mine.id]
        assert not torch_module._global_forward_pre_hooks
        assert not torch_module._global_backward_hooks
        build_recipe(lambda _: recipe_of(nn.Linear(3, 1)), {}, 0, COLUMNS)
    finally:
        mine.remove()


class Staged(nn.Sequential):
    """Freezes its first stage whenever it is switched, as detectors of mmdet do."""

    def train(self, mode: bool = True) -> Staged:
        super().train(mode)
        self[0].requires_grad_(False).eval()
        return self


def test_what_the_train_of_a_model_freezes_is_frozen_in_each_build() -> None:
    built = build_recipe(
        lambda params: recipe_of(Staged(nn.Linear(3, 3), nn.Linear(3, 1))), {}, 0, COLUMNS
    )
    assert [p.requires_grad for p in built.model.parameters()] == [False, False, True, True]
    assert all(module.training for module in built.model.modules())  # as it was made
