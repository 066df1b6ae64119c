"""Metrics that depend on which rows make a batch are told of before anything trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from sklearn.metrics import f1_score, roc_auc_score
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe
from cerebro_hydra.shards.admission.admit import admit

GENERATOR = torch.Generator().manual_seed(3)
LABELS = torch.randint(0, 3, (64,), generator=GENERATOR)
EXAMPLE = ((torch.randn(64, 4, generator=GENERATOR),), (LABELS,))


def macro_f1(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.tensor(f1_score(labels, outputs.argmax(1), average="macro"))


def hits(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(1) == labels).float().mean()


def likelihood(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.softmax(1)[torch.arange(len(labels)), labels].mean()


def constant(outputs: Tensor, labels: Tensor) -> Tensor:
    return torch.tensor(0.0)


def area(outputs: Tensor, labels: Tensor) -> Tensor:
    if len(labels) < 64:
        raise ValueError("one class alone")
    return torch.tensor(roc_auc_score(labels, outputs.float().softmax(1), multi_class="ovr"))


class Largest:
    """Takes the mean of the largest score of each state, and weighs no state by its rows."""

    def start(self) -> list[float]:
        return []

    def update(self, state: list[float], outputs: Tensor, *labels: Tensor) -> list[float]:
        return [max([*state, outputs.max().item()])]

    def merge(self, state: list[float], other: list[float]) -> list[float]:
        return [(state[0] + other[0]) / 2]

    def compute(self, state: list[float]) -> float:
        return state[0]


def warnings(metrics: dict[str, Any], **rules: Any) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = {"loss": nn.CrossEntropyLoss(), **rules}
    recipe = Recipe(model, optimizer, metrics=metrics, batch_size=64, **rules)
    recipe.bind(Columns(("x",), ("y",)))
    before = torch.get_rng_state()
    found = admit(recipe, [EXAMPLE], trial_seed=1).warnings.values()
    torch.set_rng_state(before)
    return list(found)


def test_a_function_that_is_no_mean_over_rows_is_told_of_with_its_values_and_the_remedy() -> None:
    (warning,) = warnings({"f1": (macro_f1, "max"), "hits": (hits, "max")})
    assert "metric 'f1' is 0." in warning
    assert "64 rows" in warning and "2 parts" in warning and "torchmetrics" in warning


def test_a_state_whose_merge_depends_on_partitions_is_told_of() -> None:
    (warning,) = warnings({"largest": (Largest(), "max")})
    assert "metric 'largest' is " in warning and "correct its merge" in warning


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_nothing_is_told_of_means_of_constants_and_of_what_fails_on_parts(autocast: Any) -> None:
    metrics = {
        "hits": (hits, "max"), "likelihood": (likelihood, "max"), "constant": (constant, "max"),
        "area": (area, "max"), "f1": torchmetrics.F1Score(task="multiclass", num_classes=3),
    }  # fmt: skip
    assert warnings(metrics, autocast=autocast) == []


class Computes(Largest):
    def __init__(self, value: Any) -> None:
        self.value = value

    def compute(self, state: list[float]) -> Any:
        return self.value


@pytest.mark.parametrize("value", [torch.ones(2), 1j, [0.5], "high"])
def test_what_computes_no_number_is_refused(value: Any) -> None:
    said = r"metric 'm' computes .*must give one number"
    with pytest.raises(ConfigurationError, match=said) as raised:
        warnings({"m": (Computes(value), "max")})
    assert raised.type is ConfigurationError  # whose name no message has


def test_what_has_no_value_for_few_rows_is_admitted() -> None:
    assert warnings({"m": (Computes(None), "max")}) == []


class NoMerge(torchmetrics.SumMetric):
    """It is a maximum, and tells torchmetrics that states are added up."""

    higher_is_better = True

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.sum_value = torch.maximum(self.sum_value, preds.abs().max())


class Remembers(Largest):
    """Computes with what its update has left in an attribute."""

    def __init__(self) -> None:
        self.rows = 1

    def update(self, state: Any, outputs: Tensor, labels: Tensor) -> Any:
        self.rows = len(labels)
        return super().update(state, outputs, labels)

    def compute(self, state: Any) -> float:
        return float(super().compute(state)) / self.rows


def test_an_object_that_keeps_something_beside_its_state_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'m' gives .* if one object does all, and"):
        warnings({"m": (Remembers(), "max")})


class Counts(torchmetrics.Metric):
    """Counts rows in an attribute that is no state."""

    higher_is_better, full_state_update = True, False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.tensor(0.0), dist_reduce_fx="sum")
        self.seen = 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.hits += (preds.argmax(1) == target).sum()
        self.seen += len(target)

    def compute(self) -> Tensor:
        return self.hits / max(self.seen, 1)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Counts(), r"Counts gives .* of what its states keep of it; let add_state make"),
        (NoMerge(), r"'m' can't be put together from the states of partitions .*all rows at once"),
        (
            torchmetrics.F1Score(task="multiclass", num_classes=3, average=None),
            r"MulticlassF1Score gives shape \(3,\), and a metric is one number",
        ),
    ],
)
def test_one_of_torchmetrics_that_is_no_figure_of_all_rows_is_refused(
    metric: Any, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        warnings({"m": metric})


def test_a_metric_without_a_value_of_one_row_is_taken_with_batches_of_one() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = Recipe(model, optimizer, nn.MSELoss(), ["r2"], batch_size=1)
    recipe.bind(Columns(("x",), ("y",)))
    row = ((torch.randn(1, 4),), (torch.randn(1, 1),))
    assert not admit(recipe, [row], trial_seed=1).warnings


def own(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(outputs, labels)


@pytest.mark.parametrize("loss", [own, nn.BCELoss()])
def test_accuracy_of_what_may_be_likelihoods_is_told_of_where_the_loss_does_not_say(
    loss: Any,
) -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0))
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, ["accuracy"])
    example = EXAMPLE[0], (LABELS.gt(0).float(),)
    found = admit(recipe.bind(Columns(("x",), ("y",))), [example], trial_seed=1).warnings
    assert ["accuracy"] * (loss is own) == [*found]
    assert all("above 0 for class 1" in each and "BCELoss" in each for each in found.values())


@pytest.mark.parametrize(
    ("loss", "labels", "is_told"),
    [
        (nn.SoftMarginLoss(), LABELS.gt(0).float() * 2 - 1, True),
        (nn.MSELoss(), LABELS.float() / 2, True),
        (nn.BCEWithLogitsLoss(), LABELS.gt(0).float() * 0.9, True),
        (nn.MSELoss(), LABELS.gt(0), False),
        (nn.BCEWithLogitsLoss(), LABELS.gt(0).float(), False),
    ],
)
def test_labels_that_an_accuracy_of_one_number_never_hits_are_told_of(
    loss: Any, labels: Tensor, is_told: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    recipe = Recipe(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, ["accuracy", "mae"])
    example = EXAMPLE[0], (labels,)
    found = admit(recipe.bind(Columns(("x",), ("y",))), [example], trial_seed=1).warnings
    assert ["accuracy"] * is_told == [*found]
    assert all("labels that are neither, which are never hit" in told for told in found.values())


class Sum(nn.Module):
    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, reduction="sum")


def root(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs[:, 0], labels.float()).sqrt()


@pytest.mark.parametrize(
    ("loss", "is_told"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), True),
        (Sum(), True),
        (nn.CrossEntropyLoss(), False),
        (root, False),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1])), False),
    ],
)
def test_a_loss_that_is_a_sum_over_rows_is_told_of(loss: Any, is_told: bool) -> None:
    found = warnings({}, loss=loss)
    assert len(found) == is_told
    assert all("batch of 64 rows" in each and "so it is a sum" in each for each in found)
