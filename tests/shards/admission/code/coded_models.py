"""Factories of many kinds, whose code another process must describe alike.

`python -m tests.shards.admission.code.coded_models [pickled]` prints what it says of each.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.shards.admission.trial_code import trial_code
from cerebro_hydra.storage.trial_code import TrialCode

WORDS = {"one", "two", "three", "four", "five", "six", "seven"}
BUILT = itertools.count()


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclass
class Options:
    """What a module is told."""

    width: int = 16
    mode: Mode = Mode.FAST
    names: list[str] = field(default_factory=lambda: sorted(WORDS))


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def scaled(outputs: Tensor, labels: Tensor) -> Tensor:
    return 2 * functional.cross_entropy(outputs, labels)


class Own(nn.Module):
    """A module of the user's, with attributes of many kinds."""

    rate = 0.1

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.words, self.lengths = set(WORDS), {word: len(word) for word in WORDS}
        self.scale = 1 / 3
        self.first = nn.Linear(8, options.width)
        self.act = functional.relu
        self.last = nn.ModuleDict({word: nn.Linear(options.width, 3) for word in sorted(WORDS)})

    @property
    def doubled(self) -> float:
        return 2 * self.scale

    @counted
    def forward(self, features: Tensor) -> Tensor:
        hidden = self.act(self.first(features)) * self.doubled
        if self.options.mode in {Mode.FAST, Mode.SLOW} and "one" in {"one", "two", "three"}:
            hidden = hidden + self.rate
        return torch.stack([each(hidden) for each in self.last.values()]).sum(0)


class Unlike(nn.Module):
    """A module whose attributes are others whenever it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.words = next(BUILT), list(WORDS)
        self.place = tempfile.gettempdir() + f"/{os.getpid()}"
        self.drawn = random.SystemRandom().random()
        self.told = f"{self!r} {object()}"
        self.line = nn.Linear(8, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.line(features)


class Counting(nn.CrossEntropyLoss):
    """A loss that counts its calls."""

    calls = 0

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(outputs, labels)


SHARED = Counting()


class Slow(torch.optim.SGD):
    """An optimizer of the user's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Share:
    """A metric with a state."""

    def start(self) -> list[int]:
        return [0, 0]

    def update(self, state: list[int], outputs: Tensor, labels: Tensor) -> list[int]:
        return [state[0] + int((outputs.argmax(1) == labels).sum()), state[1] + len(labels)]

    def merge(self, state: list[int], other: list[int]) -> list[int]:
        return [a + b for a, b in zip(state, other, strict=True)]

    def compute(self, state: list[int]) -> float:
        return state[0] / state[1]


def net(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3), *more)


def recipe(model: nn.Module | None = None, loss: Any = None, **options: Any) -> Recipe:
    model = net() if model is None else model
    optimizer = options.pop("optimizer", None) or torch.optim.Adam(model.parameters(), lr=0.01)
    return Recipe(model, optimizer, loss or nn.CrossEntropyLoss(), **options)


def plain() -> Recipe:
    return recipe(metrics=["accuracy"])


def own() -> Recipe:
    return recipe(Own(Options()))


def lambdas() -> Recipe:
    weight = 0.5
    return recipe(
        loss=lambda outputs, labels: weight * functional.cross_entropy(outputs, labels),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, weight),
        metrics={"mine": (lambda outputs, labels: outputs.mean(), "max")},
        collate=lambda batch, training: {**batch, "features": batch["features"] * 2},
    )


def partials() -> Recipe:
    smooth = functools.partial(functional.cross_entropy, label_smoothing=0.1)
    return recipe(
        loss=smooth,
        metrics={"mine": (functools.partial(scaled), "min"), "share": (Share(), "max")},
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3),
    )


def closures() -> Recipe:
    chosen, table = set(WORDS), {word: len(word) for word in WORDS}

    def collate(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
        return {name: values for name, values in batch.items() if name not in chosen or table}

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = net()

        def forward(self, features: Tensor) -> Tensor:
            return self.line(features) * len(chosen)

    return recipe(Local(), loss=scaled, collate=collate)


def groups() -> Recipe:
    model = net(nn.Dropout(0.1))
    model[0].requires_grad_(False)
    each = [{"params": [model[2].weight], "lr": 0.1}, {"params": [model[2].bias]}]
    return recipe(model, optimizer=Slow(each, lr=0.01, momentum=0.9), ema=0.9, clip_grad_norm=1.0)


def normed() -> Recipe:
    torch.nn.utils.parametrizations.weight_norm(model := nn.Linear(8, 3))
    return recipe(nn.Sequential(nn.BatchNorm1d(8), model))


def unlike() -> Recipe:
    return recipe(Unlike(), loss=SHARED)


def bert() -> Recipe:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=32, vocab_size=64)
    return recipe(BertForSequenceClassification(config), "model")


def gpt() -> Recipe:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=64))
    return recipe(model, "model", autocast="bfloat16")


def torch_metrics() -> Recipe:
    import torchmetrics

    made = torchmetrics.classification.MulticlassF1Score(num_classes=3)
    return recipe(metrics={"f1": made})


def stepping() -> Recipe:
    def step(model: nn.Module, batch: Any, optimizers: Any) -> Tensor:
        loss = scaled(model(batch.features), batch.label)
        loss.backward()
        optimizers.step()
        return loss

    return recipe(training_step=step)


FACTORIES = [
    plain, own, lambdas, partials, closures, groups, normed, unlike, bert, gpt, torch_metrics,
    stepping,
]  # fmt: skip


def described(factory: Callable[[], Recipe]) -> TrialCode:
    code = trial_code(factory())
    assert code is not None
    return code


def main() -> None:
    factories = FACTORIES
    if sys.argv[1:] == ["pickled"]:
        from pyspark import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        factories = cloudpickle.loads(cloudpickle.dumps(factories))
    print(json.dumps({f.__name__: asdict(described(f)) for f in factories}))


if __name__ == "__main__":
    main()
