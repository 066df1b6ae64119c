"""What two trials must have in common so that one admission speaks for both."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.admit import admission_key, training_key
from cerebro_hydra.shards.admission.effects.as_built import AsBuilt
from cerebro_hydra.shards.cut.model_key import model_key
from cerebro_hydra.shards.cut.sample import Example, Sample

SETTINGS = {"scale": 1.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.hidden = [nn.Sequential(nn.Linear(2, 2))]
        self.register_buffer("mask", torch.ones(4))
        for parameter in self.hidden[0].parameters():
            parameter.requires_grad_(False)

    def forward(self, x):
        return self.b(self.drop(self.activation(self.a(x)))) * self.mask


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


def make(
    change: Callable[[Net], object] | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> Recipe:
    torch.manual_seed(0)
    model = Net()
    if change is not None:
        change(model)
    made = optimizer(model.parameters(), **{"lr": 0.1, "weight_decay": 0.2} | options)
    return Recipe(model, made, **{"loss": nn.CrossEntropyLoss(), "shards": 2} | (settings or {}))


def examples(rows: int = 6) -> list[Example]:
    torch.manual_seed(1)
    return [((torch.randn(rows, 4),), (torch.randint(0, 4, (rows,)),))]


def key(recipe: Recipe, rows: int = 6):
    return admission_key(recipe, examples(rows))


def fill(name: str) -> Callable[[Net], object]:
    return lambda net: net.get_parameter(name).data.fill_(0.5)


def freeze(net: Net) -> None:
    net.a.requires_grad_(False)


def freeze_filled(net: Net) -> None:
    freeze(net)
    fill("a.weight")(net)


SHARED = {
    "learning rate": (make(), make(lr=0.3)),
    "weight decay": (make(), make(weight_decay=0.3)),
    "values that train": (make(), make(fill("a.weight"))),
    "early stopping": (make(), make(settings={"early_stopping": 3})),
    "equal closures": (
        make(lambda net: setattr(net, "activation", scaled(2.0))),
        make(lambda net: setattr(net, "activation", scaled(2.0))),
    ),
    "equal buffers and frozen values": (make(freeze), make(freeze)),
}

APART = {
    "no learning rate": make(lr=0.0),
    "no weight decay": make(weight_decay=0.0),
    "momentum": make(momentum=0.9),
    "another optimizer": make(optimizer=torch.optim.AdamW),
    "dropout": make(lambda net: setattr(net.drop, "p", 0.2)),
    "an attribute": make(lambda net: setattr(net, "depth", 2)),
    "an activation": make(lambda net: setattr(net, "activation", torch.tanh)),
    "a closure": make(lambda net: setattr(net, "activation", scaled(2.0))),
    "a buffer's content": make(lambda net: net.mask.fill_(2)),
    "frozen layers": make(freeze),
    "evaluation mode": make(lambda net: net.drop.eval()),
    "a hidden module": make(lambda net: net.hidden[0].append(nn.ReLU())),
    "a hidden frozen value": make(lambda net: net.hidden[0][0].bias.fill_(3)),
    "a module's hook": make(lambda net: net.a.register_forward_hook(lambda *_: None)),
    "a tied weight": make(lambda net: setattr(net.b, "weight", net.a.weight)),
    "weights in one memory": make(lambda net: setattr(net.b.weight, "data", net.a.weight.data)),
    "class weights": make(settings={"loss": nn.CrossEntropyLoss(torch.ones(4))}),
    "smoothing": make(settings={"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}),
    "metrics": make(settings={"metrics": ["accuracy"]}),
    "shards": make(settings={"shards": 3}),
    "the cut": make(settings={"cut": "export"}),
    "clipping": make(settings={"clip_grad_norm": 1.0}),
    "accumulation": make(settings={"accumulate": 2}),
    "an average": make(settings={"ema": 0.9}),
    "precision": make(settings={"autocast": "bfloat16"}),
    "a schedule": make(settings={"lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1)}),
    "collating": make(settings={"collate": lambda batch, training: batch}),
}


@pytest.mark.parametrize("what", SHARED)
def test_trials_that_differ_only_here_share_an_admission(what: str) -> None:
    one, other = SHARED[what]
    assert key(one) is not None
    assert key(one) == key(other)


@pytest.mark.parametrize("what", APART)
def test_trials_that_differ_here_are_admitted_each(what: str) -> None:
    assert key(make()) is not None
    assert key(APART[what]) != key(make())


class Partial(functools.partial[Any]):
    """Holds its function and arguments where only C sees them."""


HIDDEN = {
    "a generator": (lambda: random.Random(1), lambda: random.Random(2)),
    "a partial function": (lambda: Partial(scaled, 1.0), lambda: Partial(scaled, 2.0)),
    "a tensor with a gradient": (
        lambda: torch.ones(2), lambda: torch.ones(2, requires_grad=True)
    ),
    "tensors in one memory": (lambda: [torch.ones(2)] * 2, lambda: [torch.ones(2), torch.ones(2)]),
    "the sign of zero": (lambda: complex(0.0, 0.0), lambda: complex(0.0, -0.0)),
}  # fmt: skip


@pytest.mark.parametrize("what", HIDDEN)
def test_values_that_differ_in_what_their_attributes_hide_share_no_admission(what: str) -> None:
    one, other = (
        key(make(lambda net, value=value: setattr(net, "extra", value()))) for value in HIDDEN[what]
    )
    assert one is None or one != other


def test_frozen_values_and_class_weights_and_batches_are_compared_by_content() -> None:
    assert key(make(freeze)) != key(make(freeze_filled))
    light, heavy = torch.ones(4), torch.ones(4) * 2
    weighted = [make(settings={"loss": nn.CrossEntropyLoss(w)}) for w in (light, heavy, light)]
    assert key(weighted[0]) == key(weighted[2]) != key(weighted[1])
    assert key(make()) != key(make(), rows=5)
    assert key(make(lambda net: setattr(net, "activation", scaled(2.0)))) != key(
        make(lambda net: setattr(net, "activation", scaled(3.0)))
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "random", torch.Generator()),
        lambda net: setattr(net, "me", [[]]) or net.me.append(net.me),
    ],
    ids=["generator", "circle"],
)
def test_what_cannot_be_compared_has_no_key(change: Callable[[Net], object]) -> None:
    assert key(make(change)) is None


def reads_a_setting(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * SETTINGS["scale"]


def test_trials_for_which_a_factory_has_set_what_their_code_names_share_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = []
    for scale in (1.0, 2.0, 1.0):
        monkeypatch.setitem(SETTINGS, "scale", scale)
        recipe = make(lambda net: setattr(net, "activation", reads_a_setting))
        sample = Sample.of(recipe, examples()[0], AsBuilt.settings_of(recipe))
        keys.append((key(recipe), training_key(recipe), model_key(recipe.model, sample)))
        assert None not in keys[-1]
    assert keys[0] == keys[2]
    assert all(one != other for one, other in zip(keys[0], keys[1], strict=True))
