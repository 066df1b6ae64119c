"""Admission refuses what optimizers, their hooks and LR lambdas keep that hops with no shard."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from tests.shards import zoo
from tests.shards.hopping import start
from tests.shards.trials import Make, bound, mlp_recipe

VECTORS = zoo.vectors(8)


class Anchors(torch.optim.SGD):
    """Keeps where each parameter began as an attribute of it."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if not hasattr(parameter, "anchor"):
                parameter.anchor = parameter.detach().clone()


class KeepsForAll(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.state["all"]["steps"] = 1


class RemembersANorm(torch.optim.SGD):
    """Keeps what each step sets anew."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.info = {"norm": 0.0, "k": 1.0}

    def step(self, closure=None):
        group = self.param_groups[0]
        self.info["norm"] = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        return super().step(closure)


def counting_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=0.1), [0]

    def hook(*_):
        calls[0] += 1

    optimizer.register_step_post_hook(hook)
    return optimizer


def ones() -> Iterator[float]:
    for number in [1.0] * 30:  # whose place no variable has
        yield 1 * number


def counts() -> dict[str, Any]:
    """Return what has another place, or value, after each step."""
    return {
        "count": itertools.count(), "zip": zip(itertools.count(), itertools.count(), strict=False),
        "map": map(float, itertools.count()), "chain": itertools.chain([1, 2, 3], [4]),
        "islice": itertools.islice(itertools.count(), 99), "cycle": itertools.cycle([1, 2]),
        "enumerate": enumerate(itertools.count()), "list": iter([1.0] * 9), "generator": ones(),
        "pairs": itertools.pairwise(itertools.repeat(1.0, 9)),
        "sums": itertools.accumulate(itertools.repeat(1.0)),
    }  # fmt: skip


def adding(name: str) -> Callable[[Any], object]:
    return {
        "float": lambda held: held.update(n=held["n"] + 1.0),
        "bool": lambda held: held.update(n=not held["n"]),
        "number of numpy": lambda held: held.update(n=np.int64(held["n"]) + 1),
        "tuple": lambda held: held.update(n=(*(held["n"] or ()), 1.0)),
    }[name]


def by(optimizer: type[torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: optimizer(model.parameters(), lr=0.1)


def counted_by(calls: list[int]) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    def factor(epoch):
        calls[0] += 1
        return 1 / calls[0]

    return lambda optimizer: LambdaLR(optimizer, factor)


def each_counted(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return counted_by([0])(optimizer)


REFUSED: dict[str, tuple[Callable[[int], Make], str]] = {
    "a count in a hook": (
        lambda shards: mlp_recipe(counting_hook, shards=shards),
        r"each step changes what is kept by a step post hook of optimizer SGD at \[0\]\.calls\[0\]",
    ),
    "a tensor on each parameter": (
        lambda shards: mlp_recipe(by(Anchors), shards=shards),
        "each step changes attribute 'anchor' of parameter '0.bias'.*in the optimizer's state",
    ),
    "state under another key": (
        lambda shards: mlp_recipe(by(KeepsForAll), shards=shards),
        r"KeepsForAll keeps state under 'all', which is no parameter.* as group\['all'\]",
    ),
    "a count that each LR scheduler has for itself": (
        lambda shards: mlp_recipe(shards=shards, lr_scheduler=each_counted),
        r"each step changes attribute 'lr_lambdas' of the lr_scheduler \(LambdaLR\) at "
        r"\[0\]\.calls\[0\].*the epoch",
    ),
    "a count in an LR lambda": (
        lambda shards: mlp_recipe(shards=shards, lr_scheduler=counted_by([0])),
        r"each step changes a value of the lr_scheduler at \.factor\.calls\[0\].*the epoch",
    ),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_by_the_same_name_in_each_cut(what: str, shards: int) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ConfigurationError, match=message):
        start(bound(make(shards))(), [VECTORS])


@pytest.mark.parametrize("kind", counts())
def test_an_iterator_that_an_lr_lambda_or_a_hook_advances_is_a_count(kind: str) -> None:
    def advanced(optimizer: torch.optim.Optimizer) -> LambdaLR:
        places = counts()[kind]
        return LambdaLR(optimizer, lambda epoch: 1.0 if next(places) else 0.9)

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer, places = torch.optim.SGD(model.parameters(), lr=0.1), counts()[kind]
        optimizer.register_step_post_hook(lambda *_: next(places) and None)
        return optimizer

    for make in (mlp_recipe(lr_scheduler=advanced), mlp_recipe(hooked)):
        with pytest.raises(ConfigurationError, match=r"each step changes .* at .*places"):
            start(bound(make)(), [VECTORS])


@pytest.mark.parametrize("kind", ["float", "bool", "number of numpy", "tuple"])
def test_what_each_step_moves_on_in_a_hook_is_a_count_of_whatever_type(kind: str) -> None:
    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer, held = torch.optim.SGD(model.parameters(), lr=0.1), {"n": 0.0}
        optimizer.register_step_pre_hook(lambda *_: adding(kind)(held))
        return optimizer

    with pytest.raises(ConfigurationError, match=r"a step pre hook of .* at \[0\]\.held"):
        start(bound(mlp_recipe(hooked))(), [VECTORS])


def test_what_each_step_sets_anew_is_admitted_and_known_by_its_path() -> None:
    trial = start(bound(mlp_recipe(by(RemembersANorm)))(), [VECTORS])
    name = "attribute 'info' of optimizer RemembersANorm"
    assert f"{name}\0['norm']" in trial.admission.attributes


class ByRate(nn.Module):
    """A loss that weighs by the learning rate."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer

    def forward(self, outputs, labels):
        loss = nn.functional.cross_entropy(outputs, labels)
        return loss + self.optimizer.param_groups[0]["lr"] * outputs.square().mean()


class SetsRate(zoo.Net):
    def forward(self, x):
        for group in self.groups:
            group["lr"] *= 0.99
        return super().forward(x)


def of_loss() -> Recipe:
    model = zoo.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Recipe(model, optimizer, ByRate(optimizer), batch_size=8)


def of_forward() -> Recipe:
    model = SetsRate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.groups = optimizer.param_groups
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=8)


def of_metric() -> Recipe:
    recipe = of_loss()
    optimizer = recipe.optimizer
    rate = lambda outputs, labels: optimizer.param_groups[0]["lr"]  # noqa: E731
    return replace(recipe, loss=nn.CrossEntropyLoss(), metrics={"rate": (rate, "min")})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (of_loss, "attribute 'optimizer' of the loss"),
        (of_forward, r"attribute 'groups' of the model \(SetsRate\)"),
        (of_metric, r"a value of metric 'rate' at \.optimizer"),
    ],
)
def test_what_refers_to_the_optimizer_is_refused_by_name(make: Make, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{name} refers to the optimizer, .* a copy, so"):
        start(bound(make)(), [VECTORS])
