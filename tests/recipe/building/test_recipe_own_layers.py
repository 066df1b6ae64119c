"""A model has plain layers to itself, to which something else refers, too."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.build import take_own_layers

GELU = nn.GELU()
DROPOUT = nn.Dropout(0.1)
KNOWN: dict[str, nn.Module] = {"relu": nn.ReLU(), "tanh": nn.Tanh()}


class ByDefault(nn.Module):
    def __init__(
        self,
        act: nn.Module = nn.Hardtanh(-2, 2),  # noqa: B008
        *,
        end: nn.Module = nn.Sequential(nn.Tanh(), nn.Dropout(0.1)),  # noqa: B008
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act, end)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layers(x))


def by_default() -> nn.Module:
    return ByDefault()


def by_a_global() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), GELU, nn.Sequential(GELU))


def by_a_table() -> nn.Module:
    return nn.Sequential(KNOWN["relu"], nn.Linear(3, 3), KNOWN["tanh"])


MODELS = [by_default, by_a_global, by_a_table]


def plain_layers(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if not list(each.parameters())]


def of(model: nn.Module) -> Recipe:
    return Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())


@pytest.mark.parametrize("build", MODELS)
def test_two_models_share_no_plain_layer_and_compute_as_before(build: Any) -> None:
    torch.manual_seed(0)
    one = build()
    names = [name for name, _ in one.named_modules(remove_duplicate=False)]
    x = torch.randn(4, 3)
    before = one.eval()(x)
    given = set(map(id, one.modules()))
    take_own_layers(of(one), build)
    other = build()
    assert given & set(map(id, other.modules()))
    take_own_layers(of(other), build)
    assert not set(one.modules()) & set(other.modules())
    assert torch.equal(one(x), before)
    assert [name for name, _ in one.named_modules(remove_duplicate=False)] == names
    kinds = [[type(each) for each in model.modules()] for model in (one, other, build())]
    assert kinds[0] == kinds[1] == kinds[2], "also what a model has twice"
    gc.collect()
    for model in (one, other):
        alone = list(map(id, model.modules()))
        take_own_layers(of(model), build)
        assert list(map(id, model.modules())) == alone, "what no other one has stays"


class Scheduled(nn.Module):
    """Sets the rate of its dropouts, to which it refers by a list, in each forward."""

    def __init__(self, drop: nn.Module = nn.Dropout(0.1)) -> None:  # noqa: B008
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1), nn.Tanh())
        self.drop = drop
        self.drops = [each for each in self.modules() if isinstance(each, nn.Dropout)]
        self.steps = [*self.layers]


def of_a_global() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), DROPOUT)


@pytest.mark.parametrize("build", [Scheduled, of_a_global])
def test_a_layer_to_which_its_model_may_refer_otherwise_stays(build: Any) -> None:
    model = build()
    modules = list(model.modules())
    take_own_layers(of(model), build)
    assert list(model.modules()) == modules


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_is_no_plain_layer_stays() -> None:
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    others = [nn.Linear(2, 2), nn.BatchNorm1d(2), hooked, Keeps(), nn.Sequential(Keeps())]
    model = nn.Sequential(*others, nn.ModuleList([others[0]]))
    take_own_layers(of(model), by_default)
    assert [*model][:-1] == others
    assert model[-1][0] is others[0]
