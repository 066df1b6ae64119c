"""Factories that use every training feature; agents in other processes import them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from cerebro_hydra.recipe import Recipe
from tests.conformance import text


class MacroF1:
    """The F1 score averaged over classes, from counts that any two partitions can add."""

    def __init__(self, classes: int) -> None:
        self.classes = classes

    def start(self) -> list[list[int]]:
        return [[0, 0, 0] for _ in range(self.classes)]

    def update(self, state: Any, outputs: Tensor, labels: Tensor) -> Any:
        chosen = outputs.argmax(1)
        for number in range(self.classes):
            right = int(((chosen == number) & (labels == number)).sum())
            state[number][0] += right
            state[number][1] += int((chosen == number).sum()) - right
            state[number][2] += int((labels == number).sum()) - right
        return state

    def merge(self, state: Any, other: Any) -> Any:
        return [
            [a + b for a, b in zip(x, y, strict=True)] for x, y in zip(state, other, strict=True)
        ]

    def compute(self, state: Any) -> float:
        scores = [2 * hit / max(1, 2 * hit + wrong + missed) for hit, wrong, missed in state]
        return sum(scores) / len(scores)


def jitter(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    """Noise on the features, and now and then a shorter row of them."""
    if training:
        features = batch["features"]
        batch["features"] = features + 0.1 * torch.randn(features.shape)
    return batch


def rich(params: dict[str, Any]) -> Recipe:
    """Mixed precision, moving averages, augmentation, weights, F1 and a schedule on it."""
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    )
    return Recipe(
        model=model,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=params["lr"]),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        metrics={"f1": (MacroF1(4), "max"), "accuracy": (accuracy, "max")},
        batch_size=16,
        shards=2,
        lr_scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", factor=0.5, patience=0),
        lr_metric="f1",
        clip_grad_value=0.5,
        accumulate=2,
        autocast="bfloat16",
        ema=0.9,
        early_stopping=params.get("patience"),
        collate=jitter,
    )


def accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The share of rows whose largest output is their label."""
    return (outputs.argmax(1) == labels).float().mean()


class TwoHeads(nn.Module):
    """An image and a table go in; a class and a number come out."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16))
        self.table = nn.Sequential(nn.Linear(5, 16), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(32, 16), nn.ReLU())
        self.kind, self.size = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, table: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(torch.cat([self.image(image), self.table(table)], 1))
        return self.kind(y), self.size(y).squeeze(1)


def two_heads(params: dict[str, Any]) -> Recipe:
    """Two inputs by name, two losses with weights."""
    model = TwoHeads()
    return Recipe(
        model=model,
        optimizer=torch.optim.NAdam(model.parameters(), lr=params["lr"]),
        loss=[nn.CrossEntropyLoss(), nn.MSELoss()],
        loss_weights=[1.0, 0.3],
        metrics={"kind_accuracy": (kind_accuracy, "max")},
        batch_size=16,
        shards=3,
        lr_scheduler=lambda o: lr_scheduler.ExponentialLR(o, 0.5),
        lr_interval="epoch",
    )


def kind_accuracy(outputs: tuple[Tensor, Tensor], kind: Tensor, size: Tensor) -> Tensor:
    """Accuracy of the first head."""
    return accuracy(outputs[0], kind)


def bert(params: dict[str, Any]) -> Any:
    """A classifier of `transformers`, with its own loss."""
    model = text.bert(16, 3, vocabulary=64, positions=16)
    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=params["lr"]),
        loss="model",
        metrics=["accuracy"],
        batch_size=8,
        shards=params["shards"],
        collate=without_padding,
    )


def without_padding(batch: dict[str, Tensor], training: bool) -> dict[str, Tensor]:
    """As long as the longest row of the batch."""
    length = max(2, int(batch["attention_mask"].sum(1).max()))
    cut = {name: batch[name][:, :length] for name in ("input_ids", "attention_mask")}
    return batch | cut


SHARED = SimpleNamespace(losses=[])
"""Is where all layers of all trials leave what the loss adds up."""


class Leaves(nn.Module):
    """Leaves a loss of its outputs in a place that the trials of a process share."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(16, 16), weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        SHARED.losses.append(self.weight * x.pow(2).mean())
        return x


class LeavesAll(nn.Module):
    """Empties that place before its layers compute."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Leaves(weight) for _ in range(3)), nn.Linear(16, 4))

    def forward(self, features: Tensor) -> Tensor:
        SHARED.losses = []
        return self.layers(features)  # type: ignore[no-any-return]


def all_losses(outputs: Tensor, label: Tensor) -> Tensor:
    """What all layers have left, and the cross-entropy."""
    return nn.functional.cross_entropy(outputs, label) + sum(SHARED.losses)


def leaving(params: dict[str, Any]) -> Recipe:
    """Trials that leave their losses in one place."""
    model = LeavesAll(params["weight"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Recipe(model, optimizer, all_losses, batch_size=16, shards=3)


class Configured:
    """Has settings that all trials of a process see, as a global CFG has."""

    scale = power = 1.0
    penalties: list[Tensor] = []  # noqa: RUF012


CONFIG = SimpleNamespace(slope=0.0)


class ReadsSettings(nn.Module):
    """Reads a setting of its factory, and what each step leaves, if it is one that leaves some."""

    def __init__(self, leaves: bool, config: SimpleNamespace, act: nn.Module = nn.ReLU()) -> None:  # noqa: B008
        super().__init__()
        self.config, self.act = config, act
        self.first, self.last, self.leaves = nn.Linear(16, 32), nn.Linear(32, 4), leaves
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        hidden = nn.functional.leaky_relu(self.act(self.first(x) + 1) - 1, self.config.slope)
        hidden = hidden * Configured.scale * Configured.power
        if self.leaves:
            Configured.penalties.clear()
            Configured.penalties.append(hidden.square().mean())
        return self.last(hidden)


def penalized(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels) + sum(Configured.penalties)


def configured(params: dict[str, Any]) -> Recipe:
    """Set what all trials of the process see, for a forward and the learning rate to read.

    A buffer decides on that, too.
    """
    Configured.scale = params["scale"]
    if params["leaves"]:
        Configured.power = 1.5  # which others find as before
    CONFIG.slope = params["scale"] / 8
    model = ReadsSettings(params["leaves"], CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def rate(epoch: int) -> float:
        return Configured.scale * (0.5 if model.steps > 4 else 1.0)

    return Recipe(
        model,
        optimizer,
        penalized,
        batch_size=16,
        lr_scheduler=lambda optimizer: lr_scheduler.LambdaLR(optimizer, rate),
        lr_interval="epoch",
    )


TABLES: dict[int, Tensor] = {}
PRETRAINED = np.random.default_rng(0).random((32, 4), np.float32)


class OfUsersValues(nn.Module):
    """Keeps a table for all models of the process, and begins with weights from an array."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.last = nn.Parameter(torch.from_numpy(PRETRAINED))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if hidden.shape[1] not in TABLES:
            TABLES[hidden.shape[1]] = torch.linspace(0, 1, hidden.shape[1])
        return (hidden + TABLES[hidden.shape[1]]) @ self.last


def of_users_values(params: dict[str, Any]) -> Recipe:
    model = OfUsersValues()
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=16)


TRUNK = nn.Linear(16, 32).requires_grad_(False)


def of_one_trunk(params: dict[str, Any]) -> Recipe:
    """Give a frozen layer to each model, which all trials of a process have then."""
    model = nn.Sequential(TRUNK, nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=params["lr"])
    return Recipe(model, optimizer, nn.CrossEntropyLoss(), batch_size=16)
