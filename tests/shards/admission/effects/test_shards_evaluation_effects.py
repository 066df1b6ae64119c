"""What evaluations leave beside parameters and buffers: refused where something depends on it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.admission.effects.evaluation_effects import UNREAD
from cerebro_hydra.shards.admission.effects.readings import KnownChanges
from tests.shards import zoo
from tests.shards.executors.executor_case import assert_equal_to_plain
from tests.shards.hopping import start
from tests.shards.trials import Make, made, two_sub_epochs

VECTORS = zoo.singly(zoo.vectors(8, 5))


class SetsForTraining(zoo.Net):
    """Divides by what the latest evaluation has measured."""

    temperature = 1.0

    def add(self):
        self.temperature = 1.0

    def forward(self, x):
        if self.training:
            return super().forward(x) / self.temperature
        self.temperature = 1 + x.std().item()
        return super().forward(x)


class CountsEvaluations(zoo.Net):
    def add(self):
        self.evaluated = 0

    def forward(self, x):
        self.evaluated += not self.training
        return super().forward(x)


class KeepsForEvaluation(zoo.Net):
    """Evaluates by an average of what it has evaluated."""

    def add(self):
        self.mean = 0.0

    def forward(self, x):
        if not self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        return super().forward(x)


class Shows(zoo.Net):
    """Keeps for whoever looks what it has seen: of training, and of evaluation alone."""

    def add(self):
        self.tables = {}

    def forward(self, x):
        self.latest = x.detach()
        self.tables.setdefault((len(x), self.training), torch.ones(len(x), 1))
        y = super().forward(x * self.tables[len(x), self.training])
        if not self.training:
            self.evaluated = y
        return y


class Counts:
    """Counts in a metric, a loss or a collate."""

    def __init__(self, training: bool) -> None:
        self.calls, self.training = 0, training

    def __call__(self, *given: Any) -> Any:
        self.calls += torch.is_grad_enabled() == self.training
        return nn.functional.cross_entropy(*given)


class CountsBatches(Counts):
    def __call__(self, batch, training):
        self.calls += training == self.training
        return batch


class Balances(nn.Module):
    """Weighs classes as they are in the batch of training before."""

    weight: torch.Tensor | None = None

    def forward(self, outputs, labels):
        if outputs.requires_grad:
            self.weight = 1 + torch.bincount(labels, minlength=outputs.shape[1]).float()
        return nn.functional.cross_entropy(outputs, labels, weight=self.weight)


class Centers:
    """Takes away the mean of the batch of training before."""

    mean: Any = 0.0

    def __call__(self, batch, training):
        if training:
            self.mean = batch["x"].mean(0)
        return {**batch, "x": batch["x"] - self.mean}


class WarmsUp(zoo.Net):
    """Weighs by a number that training sets, and that is 0 in the first steps, as by default."""

    beta = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.beta = max(0.0, (self.steps.item() - 8) / 20)
        return super().forward(x) * (1 + self.beta)


class KeepsTheFirst(zoo.Net):
    """Takes away the mean of the first batch that is evaluated."""

    mean: Any = None

    def forward(self, x):
        if self.training:
            return super().forward(x)
        if self.mean is None:
            self.mean = x.mean()
        return super().forward(x - self.mean)


class KeepsALoss(nn.Module):
    """Divides by the first loss of evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None

    def forward(self, outputs, labels):
        loss = nn.functional.cross_entropy(outputs, labels)
        if torch.is_grad_enabled():
            return loss
        if self.first is None:
            self.first = loss.item()
        return loss / self.first


class Mixes:
    """Draws how much of the rows it takes, which evaluation takes, too."""

    part: Any = 1.0

    def __call__(self, batch, training):
        if training:
            self.part = torch.rand(()).item()
        return {**batch, "x": batch["x"] * self.part}


class DividesByRows(zoo.Net):
    """Trains by the number of rows of the latest evaluation."""

    def add(self):
        self.rows = 8

    def forward(self, x):
        if not self.training:
            self.rows = len(x)
        return super().forward(x) * (self.rows / 8)


class Mixup:
    """Notes for the loss how it mixed rows; of evaluations the loss asks only whether it did."""

    part, others = 1.0, None

    def __call__(self, batch, training):
        self.others = None
        if not training:
            return batch
        self.part, self.others = torch.rand(()).item(), torch.randperm(len(batch["x"]))
        mixed = self.part * batch["x"] + (1 - self.part) * batch["x"][self.others]
        return {**batch, "x": mixed}

    def loss(self, outputs, labels):
        loss = nn.functional.cross_entropy(outputs, labels)
        if self.others is None:
            return loss
        other = nn.functional.cross_entropy(outputs, labels[self.others])
        return self.part * loss + (1 - self.part) * other


class Masks:
    """Notes the number of rows of any batch, which the loss takes in training alone."""

    rows, mask = 0, None

    def __call__(self, batch, training):
        self.rows = len(batch["x"])
        if training:
            self.mask = (torch.rand(self.rows) < 0.8).float()
        return batch

    def loss(self, outputs, labels):
        losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
        return (losses * self.mask).sum() / self.rows if losses.requires_grad else losses.mean()


FIRST: dict[str, Any] = {}


def keeps_in_a_global(outputs, labels):
    if "mean" not in FIRST:
        FIRST["mean"] = outputs.mean().item()
    return (outputs - FIRST["mean"]).square().mean()


def keeping() -> Callable[..., Any]:
    kept: dict[str, Any] = {}

    def metric(outputs, labels):
        return (outputs - kept.setdefault("mean", outputs.mean().item())).square().mean()

    return metric


def counted() -> Callable[..., Any]:
    calls = [0]

    def metric(outputs, labels):
        calls[0] += 1
        return (outputs.argmax(1) == labels).float().mean()

    return metric


def with_columns(make: Make) -> Make:
    return lambda: make().bind(Columns(("x",), ("y",)))


REFUSED: dict[str, tuple[Callable[..., Make], str]] = {
    "training depends on it": (
        lambda **o: made(SetsForTraining, **o),
        r"training depends on attribute 'temperature' of the model \(SetsForTraining\), which an "
        r"evaluation has changed; write to it `if self\.training` only, or let every forward",
    ),
    "a count": (
        lambda **o: made(CountsEvaluations, **o),
        "each evaluation changes attribute 'evaluated' of the model",
    ),
    "an average": (
        lambda **o: made(KeepsForEvaluation, **o),
        "each evaluation changes attribute 'mean' of the model",
    ),
    "a metric": (
        lambda **o: made(zoo.Net, metrics={"m": (counted(), "max")}, **o),
        "each evaluation changes a value of metric 'm'.*, .*start, update, merge and compute",
    ),
    "a loss": (
        lambda **o: made(zoo.Net, lambda _: Counts(training=False), **o),
        "each evaluation changes a value of the loss.*, .*; let it keep nothing",
    ),
    "a loss that training has set": (
        lambda **o: made(zoo.Net, lambda _: Balances(), **o),
        "evaluations compute with attribute 'weight' of the loss, which training sets; .* too, or",
    ),
    "a collate that training has set": (
        lambda **o: with_columns(made(zoo.Net, collate=Centers(), **o)),
        "evaluations compute with a value of the collate, which training sets; .*buffer",
    ),
    "a number that training sets later": (
        lambda **o: made(WarmsUp, **o),
        r"evaluations compute with attribute 'beta' of the model \(WarmsUp\), which training sets",
    ),
    "a collate that draws in training": (
        lambda **o: with_columns(made(zoo.Net, collate=Mixes(), **o)),
        "evaluations compute with a value of the collate, which training sets",
    ),
    "a model that keeps the first batch": (
        lambda **o: made(KeepsTheFirst, **o),
        r"evaluations depend on attribute 'mean' of the model \(KeepsTheFirst\), which the first",
    ),
    "a loss that keeps the first": (
        lambda **o: made(zoo.Net, lambda _: KeepsALoss(), **o),
        "evaluations depend on attribute 'first' of the loss, which the first one sets",
    ),
    "a metric that keeps the first": (
        lambda **o: made(zoo.Net, metrics={"m": (keeping(), "min")}, **o),
        "evaluations depend on a value of metric 'm', which the first one sets",
    ),
    "a metric that keeps it in a global": (
        lambda **o: made(zoo.Net, metrics={"m": (keeps_in_a_global, "min")}, **o),
        "evaluations depend on global variable 'FIRST' .*, which the first one sets",
    ),
    "training depends on the rows of a batch": (
        lambda **o: made(DividesByRows, **o),
        r"training depends on attribute 'rows' of the model \(DividesByRows\), which an evaluation",
    ),
    "a collate": (
        lambda **o: with_columns(made(zoo.Net, collate=CountsBatches(training=False), **o)),
        "each evaluation changes a value of the collate.*, .*; let it keep nothing",
    ),
}


@pytest.mark.parametrize("rules", [{"shards": 1}, {"shards": 2}, {"shards": 2, "ema": 0.9}])
@pytest.mark.parametrize("what", REFUSED)
def test_what_depends_on_earlier_evaluations_is_refused_by_name(
    what: str, rules: dict[str, Any]
) -> None:
    make, message = REFUSED[what]
    FIRST.clear()
    with pytest.raises(ConfigurationError, match=message):
        start(make(**rules)(), VECTORS)


@pytest.mark.parametrize("shards", [1, 2])
def test_what_evaluation_alone_keeps_for_nobody_is_no_harm(shards: int) -> None:
    trial = assert_equal_to_plain(made(Shows, shards=shards), two_sub_epochs(), "modules")
    assert "attribute 'evaluated' of the model (Shows)" in trial.admission.set_in_evaluation


@pytest.mark.parametrize("kind", [Mixup, Masks])
def test_what_a_collate_notes_for_the_loss_of_its_batch_is_no_harm(kind: Callable[[], Any]) -> None:
    collate = kind()
    trial = start(with_columns(made(zoo.Net, lambda _: collate.loss, collate=collate))(), VECTORS)
    assert "a value of the loss" in trial.admission.set_in_evaluation
    trial.train(VECTORS)
    trial.evaluate(zoo.vectors(8, 5))


class LooksAtWhatTrainingSets(nn.Module):
    """Has attributes that training sets; in evaluation it looks at two of them, for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mean = zoo.Net(), None
        self.largest, self.smallest = 0.0, 0.0

    def forward(self, x):
        if self.training:
            self.largest, self.smallest, self.mean = x.max().item(), x.min().item(), x.mean()
        return (
            self.net(x) + 0 * (self.largest < -9) + 0 * len([each for each in [self.mean] if each])
        )


@pytest.mark.parametrize("shards", [1, 2])
def test_what_evaluation_does_not_read_of_training_is_known(shards: int) -> None:
    trial = start(made(LooksAtWhatTrainingSets, shards=shards)(), VECTORS)
    unread = {each for each in trial.admission.set_in_evaluation if each.startswith(UNREAD)}
    assert unread == {f"{UNREAD}attribute 'smallest' of the model (LooksAtWhatTrainingSets)"}


class KeepsNothing(zoo.Net):
    """Has a buffer with attributes of torch's own, and a config that each run of it sets."""

    def add(self):
        self.config = SimpleNamespace(use_cache=True)
        self.one = nn.Buffer(torch.ones(()), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.one


@pytest.mark.parametrize("shards", [1, 2])
def test_what_only_torch_and_this_package_set_is_no_change(shards: int) -> None:
    admission = start(made(KeepsNothing, shards=shards)(), VECTORS).admission
    assert KnownChanges(admission.attributes).told(9) == []
    assert admission.set_in_evaluation == ()


class Halves:
    """A metric that is halved after some batches."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs, labels):
        self.calls += 1
        return (outputs.argmax(1) == labels).float().mean() * (1 if self.calls < 3 else 0.5)

    def method(self, outputs, labels):
        return self(outputs, labels)


class Sums(Halves):
    """The same with a state."""

    def start(self):
        return 0.0

    def update(self, state, outputs, labels):
        return state + super().__call__(outputs, labels).item()

    def merge(self, state, other):
        return state + other

    def compute(self, state):
        return state


def evaluated(recipe: Recipe) -> list[Any]:
    trial = start(recipe, VECTORS)
    return [trial.evaluate(zoo.vectors(8, 8, 8, 5)) for _ in range(3)]


@pytest.mark.parametrize("metric", [Halves, Sums, lambda: Halves().method])
def test_a_metric_that_is_an_object_measures_each_batch_as_the_factory_made_it(
    metric: Callable[[], Any],
) -> None:
    halved, other, third = evaluated(made(zoo.Net, metrics={"m": (metric(), "max")})())
    plain, *_ = evaluated(made(zoo.Net, metrics=["accuracy"])())
    assert halved == other == third
    if metric is not Sums:
        total, rows = halved.sums["m"]
        hits, _ = plain.sums["accuracy"]
        assert (round(total, 5), rows) == (hits, 29)


class ReturnsNothing(zoo.Net):
    """Has a train() without a return, as detectors have."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)


def test_nobody_asks_what_train_and_eval_return() -> None:
    trial = start(made(ReturnsNothing)(), VECTORS)
    trial.train(VECTORS)
    trial.evaluate(zoo.vectors(8))
