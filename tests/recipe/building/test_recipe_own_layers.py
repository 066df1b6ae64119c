"""A model has plain layers to itself, to which something else refers, too."""

from __future__ import annotations

import functools
import gc
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.build import take_own_layers

GELU = nn.GELU()
DROPOUT, SLOPE = nn.Dropout(0.1), nn.LeakyReLU(0.1)
KNOWN: dict[str, nn.Module] = {"relu": nn.ReLU(), "tanh": nn.Tanh()}


class ByDefault(nn.Module):
    def __init__(
        self,
        act: nn.Module = nn.ReLU(inplace=False),  # noqa: B008
        *,
        end: nn.Module = nn.Sequential(nn.Tanh(), nn.Softsign()),  # noqa: B008
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


class OfItsClass(nn.Module):
    act: nn.Module = nn.Tanh()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), self.act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@functools.lru_cache
def kept() -> nn.Module:
    return nn.Softsign()


def by_a_cache() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), kept())


MODELS = [by_default, by_a_global, by_a_table, OfItsClass, by_a_cache]


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
    take_own_layers(of(one))
    other = build()
    assert given & set(map(id, other.modules()))
    take_own_layers(of(other))
    assert not set(one.modules()) & set(other.modules())
    assert torch.equal(one(x), before)
    assert [name for name, _ in one.named_modules(remove_duplicate=False)] == names
    kinds = [[type(each) for each in model.modules()] for model in (one, other, build())]
    assert kinds[0] == kinds[1] == kinds[2], "also what a model has twice"
    gc.collect()
    for model in (one, other):
        alone = list(map(id, model.modules()))
        take_own_layers(of(model))
        assert list(map(id, model.modules())) == alone, "a model that was built before stays"


class Referring(nn.Module):
    """Has an activation that all models have, and refers to it by something else, too."""

    def __init__(self, by: str, act: nn.Module = nn.ReLU()) -> None:  # noqa: B008
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), act)
        self.referring = REFERRING[by](act)


class Slotted:
    __slots__ = ("layer",)

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


REFERRING: dict[str, Any] = {
    "list": lambda layer: [layer],
    "key": lambda layer: {layer: 1.0},
    "weak key": lambda layer: WeakKeyDictionary({layer: 1.0}),
    "id": lambda layer: {id(layer): 1.0},
    "slot": Slotted,
    "closure": lambda layer: lambda: layer,
    "partial": lambda layer: partial(print, end=[layer]),
    "method": lambda layer: layer.extra_repr,
}


@pytest.mark.parametrize("by", REFERRING)
def test_a_layer_to_which_its_model_refers_otherwise_stays(by: str) -> None:
    model = Referring(by)
    before = list(model.layers)
    take_own_layers(of(model))
    after = list(model.layers)
    assert after[2] is before[2] and after[1] is not before[1]


ANNEALED, RAISED, LEAKY = nn.LeakyReLU(0.5), nn.ELU(), nn.LeakyReLU(0.2)


class Acts:
    main = nn.CELU()


class Leaks:
    @property
    def layer(self) -> nn.Module:
        return LEAKY


class Anneals(Leaks):
    def step(self, number: int) -> None:
        ANNEALED.negative_slope = 1 / (1 + number)

    @staticmethod
    def raise_it(number: int) -> None:
        RAISED.alpha = number


class Annealed(nn.Module):
    """Has activations that methods of other classes set by their names."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(3, 3), ANNEALED, RAISED, LEAKY, Acts.main, GELU]
        self.layers, self.by = nn.Sequential(*layers), Anneals()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.by.step(2)
        Acts.main.alpha = 2.0
        return self.layers(x)  # type: ignore[no-any-return]


def test_a_layer_that_a_method_of_another_class_names_stays() -> None:
    model = Annealed()
    take_own_layers(of(model))
    assert [*model.layers][1:5] == [ANNEALED, RAISED, LEAKY, Acts.main]
    assert model.layers[5] is not GELU


NONE, GAINS = nn.Identity(), {KNOWN["tanh"]: 1.5}


class Compares(nn.Module):
    """Asks for the identity of its layers, by a global variable, a class and a default."""

    default: nn.Module = nn.ReLU()

    def __init__(self, short: nn.Module = NONE) -> None:
        super().__init__()
        self.short, self.tanh, self.act = short, KNOWN["tanh"], self.default
        self.line = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tanh(self.line(x)) * gain_of(self.tanh)
        h = h if self.short is NONE else h + self.short(x)
        return h if self.act is type(self).default else self.act(h)  # type: ignore[no-any-return]


def gain_of(layer: nn.Module) -> float:
    return GAINS.get(layer, 1.0)


def test_a_layer_for_whose_identity_code_asks_stays() -> None:
    model = Compares()
    before = list(model.children())
    take_own_layers(of(model))
    assert list(model.children()) == before


def test_a_layer_to_which_a_scheduler_refers_stays() -> None:
    model = by_default()
    recipe = replace(of(model), lr_scheduler=partial(by_slope, layer=model.act))
    before = list(model.modules())
    take_own_layers(recipe)
    after = list(model.modules())
    assert model.act in after and before != after


def by_slope(optimizer: torch.optim.Optimizer, layer: nn.Module) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)


def of_a_rate() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), DROPOUT)


def test_a_layer_whose_numbers_may_be_set_as_training_goes_on_stays() -> None:
    model = of_a_rate()
    take_own_layers(of(model))
    assert list(model)[1:] == [DROPOUT]


class SetsASlope(nn.Module):
    """Sets a number of an activation that is global, by its global name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), SLOPE, nn.ELU(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SLOPE.negative_slope = 0.2
        return self.layers(x)  # type: ignore[no-any-return]


def test_an_activation_that_code_sets_by_its_name_stays_and_another_does_not() -> None:
    model = SetsASlope()
    before = list(model.layers)
    take_own_layers(of(model))
    after = list(model.layers)
    assert after[1] is SLOPE and after[2] is not before[2]


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
    take_own_layers(of(model))
    assert [*model][:-1] == others
    assert model[-1][0] is others[0]
