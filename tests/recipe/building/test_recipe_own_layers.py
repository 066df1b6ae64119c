"""A model has plain layers to itself, to which something else refers, too."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.recipe.build import take_own_layers

GELU = nn.GELU()
KNOWN: dict[str, nn.Module] = {"relu": nn.ReLU(), "both": nn.Sequential(nn.Tanh(), nn.Dropout(0.1))}


class ByDefault(nn.Module):
    def __init__(self, act: nn.Module = nn.Hardtanh(-2, 2)) -> None:  # noqa: B008
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layers(x))


def by_default() -> nn.Module:
    return ByDefault()


def by_a_global() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), GELU, nn.Sequential(GELU))


def by_a_table() -> nn.Module:
    return nn.Sequential(KNOWN["relu"], nn.Linear(3, 3), KNOWN["both"])


MODELS = [by_default, by_a_global, by_a_table]


def plain_layers(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if not list(each.parameters())]


@pytest.mark.parametrize("build", MODELS)
def test_two_models_share_no_plain_layer_and_compute_as_before(build: Any) -> None:
    torch.manual_seed(0)
    one, other = build(), build()
    shared = set(one.modules()) & set(other.modules())
    assert shared and shared <= set(plain_layers(one))
    del shared
    names = [name for name, _ in one.named_modules(remove_duplicate=False)]
    x = torch.randn(4, 3)
    before = one.eval()(x)
    for model in (one, other):
        take_own_layers(model)
    assert not set(one.modules()) & set(other.modules())
    assert torch.equal(one(x), before)
    assert [name for name, _ in one.named_modules(remove_duplicate=False)] == names
    kinds = [[type(each) for each in model.modules()] for model in (one, other, build())]
    assert kinds[0] == kinds[1] == kinds[2], "also what a model has twice"
    gc.collect()
    for model in (one, other):
        alone = list(map(id, model.modules()))
        take_own_layers(model)
        assert list(map(id, model.modules())) == alone, "what no other one has stays"


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
    take_own_layers(model)
    assert [*model][:-1] == others
    assert model[-1][0] is others[0]
    take_own_layers(torch.jit.script(nn.Sequential(GELU, nn.Linear(2, 2))))
