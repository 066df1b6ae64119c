"""Named metrics of classes: equal counts are equal figures, to the precision that ranks trials."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics import classification

from cerebro_hydra.plan.hop.ranking import EQUAL_WITHIN
from cerebro_hydra.recipe import Columns, merge_metrics
from cerebro_hydra.recipe.objective.doubles import Doubles
from cerebro_hydra.recipe.objective.torch_metrics import NAMED
from tests.recipe.small_recipes import recipe_of

CLASSES = 3
RANDOM = np.random.default_rng(7)
COUNTS = [RANDOM.integers(1, 14, (CLASSES, CLASSES)) for _ in range(8)]
Counts = np.ndarray[Any, Any]


def rows_of(counts: Counts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels and predicted classes, whose counts these are."""
    pairs = torch.cartesian_prod(torch.arange(len(counts)), torch.arange(len(counts)))
    return tuple(pairs.repeat_interleave(torch.tensor(counts.ravel()), 0).T)  # type: ignore[return-value]


def measured(metric: Any, counts: Counts, batch: int = 10_000, partitions: int = 1) -> float:
    """Measure rows of these counts as outputs of a model, in an order that the batch size seeds."""
    labels, guesses = rows_of(counts)
    order = torch.from_numpy(np.random.default_rng(batch).permutation(len(labels)))
    labels, guesses = labels[order], guesses[order]
    if len(counts) == 2:
        loss: Any = nn.BCEWithLogitsLoss()
        labels, outputs = labels.float(), (guesses.float() - 0.5)[:, None]
    else:
        loss, outputs = nn.CrossEntropyLoss(), nn.functional.one_hot(guesses, CLASSES).float()
    recipe = recipe_of(loss=loss, metrics=metric).bind(Columns(("x",), ("y",)))
    states = []
    for part in range(partitions):
        states.append(state := dict[str, Any]())
        first, end = (len(labels) * at // partitions for at in (part, part + 1))
        for place in range(first, end, batch):
            rows = slice(place, min(place + batch, end))
            recipe.update_states(state, outputs[rows], (labels[rows],))
    (value,) = merge_metrics(recipe.state_metrics, states).values()
    return value


class Own(torchmetrics.Metric):
    """Is a metric whose code is a user's, with states in single precision."""

    higher_is_better, full_state_update = True, False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(CLASSES), dist_reduce_fx="sum")

    def compute(self) -> torch.Tensor:
        return self.total.sum()


class OfScratch(Own):
    """Counts classes in tensors that are no states of its own, and writes to them."""

    counted = torch.zeros(CLASSES)

    def __init__(self) -> None:
        super().__init__()
        self.others = {"weights": [torch.ones(CLASSES)]}

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.counted.zero_().scatter_add_(0, target, torch.ones(len(target)))
        shares = torch.from_numpy(self.counted.numpy().astype(np.float32))
        shares[shares == 0] = 0.5
        shares /= len(target)
        weights = self.others["weights"][0]
        weights[0] = 2.0
        self.total += shares * weights * len(target)


class OfBuffers(Own):
    """Multiplies outputs and states with a buffer, and adds to a state by its places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("costs", torch.arange(9.0).reshape(CLASSES, CLASSES))

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.total.index_add_(0, target, (preds @ self.costs).amax(1))

    def compute(self) -> torch.Tensor:
        return (self.costs @ self.total).sum()


class OfHalves(torchmetrics.Metric):
    """Keeps a state of 16 bits."""

    higher_is_better, full_state_update = True, False

    def __init__(self) -> None:
        super().__init__()
        zero = torch.zeros((), dtype=torch.bfloat16)
        self.add_state("most", zero, dist_reduce_fx="max")

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        assert preds.dtype is torch.float32 and self.most.dtype is torch.bfloat16
        self.most = torch.maximum(self.most, preds.sum(0).amax().bfloat16())

    def compute(self) -> torch.Tensor:
        return self.most


class Missing:
    """Stands for nothing, and has a name."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True, slots=True)
class Mode:
    kind: str


UNSET, MISSING, MACRO = object(), Missing("missing"), Mode("macro")


class Options:
    def __init__(self) -> None:
        self.ignored, self.mode = MISSING, MACRO


class OfASentinel(Own):
    """Weighs rows only once somebody has said how."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = UNSET
        self.others: dict[str, Any] = {"all": [UNSET], "options": Options()}

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        assert self.weight is self.others["all"][0] is UNSET
        assert self.others["options"].ignored is MISSING
        assert self.others["options"].mode is MACRO
        self.total += preds.sum(0)


@pytest.mark.parametrize("kind", [OfScratch, OfBuffers, OfHalves, OfASentinel])
def test_a_metric_with_code_of_the_users_gives_what_torchmetrics_gives(kind: type[Any]) -> None:
    labels, guesses = rows_of(COUNTS[0])
    alone = kind()
    alone.update(nn.functional.one_hot(guesses, CLASSES).float(), labels)
    assert measured({"own": kind()}, COUNTS[0]) == pytest.approx(float(alone.compute()), rel=1e-6)
    assert math.isfinite(measured({"own": kind()}, COUNTS[0], batch=7, partitions=3))


class Renamed(classification.MulticlassF1Score):
    """Has no code of its own that computes."""


def test_a_class_that_only_has_another_name_computes_as_its_base_does() -> None:
    options: dict[str, Any] = {"num_classes": CLASSES, "average": "macro"}
    for counts in COUNTS:
        own, base = Renamed(**options), classification.MulticlassF1Score(**options)
        assert measured({"f": own}, counts) == measured({"f": base}, counts)


def ones(counts: Counts) -> tuple[Counts, Counts, Counts, Counts]:
    """Return the true and false positives and negatives of each class."""
    hit = counts.diagonal().astype(np.float64)
    missed, wrong = counts.sum(1) - hit, counts.sum(0) - hit
    return hit, wrong, missed, counts.sum() - hit - wrong - missed


def kappa(counts: Counts) -> float:
    rows = float(counts.sum())
    chance = (counts.sum(0) / rows) @ (counts.sum(1) / rows)
    return (counts.trace() / rows - chance) / (1 - chance)


def matthews(counts: Counts) -> float:
    rows, true, told = int(counts.sum()), counts.sum(1), counts.sum(0)
    both = int(counts.trace()) * rows - int(true @ told)
    return both / math.sqrt(rows**2 - int(true @ true)) / math.sqrt(rows**2 - int(told @ told))


OF_EACH: dict[str, Callable[..., Counts]] = {
    "f1": lambda tp, fp, fn, tn: 2 * tp / (2 * tp + fp + fn),
    "precision": lambda tp, fp, fn, tn: tp / (tp + fp),
    "recall": lambda tp, fp, fn, tn: tp / (tp + fn),
    "specificity": lambda tp, fp, fn, tn: tn / (tn + fp),
    "auroc": lambda tp, fp, fn, tn: (tp / (tp + fn) + tn / (tn + fp)) / 2,
}
OF_ALL = {"cohen_kappa": kappa, "matthews": matthews}
OF_CLASSES = [*OF_EACH, *OF_ALL, "average_precision", "calibration_error"]
GIVEN = {
    "jaccard": torchmetrics.JaccardIndex(task="multiclass", num_classes=CLASSES),
    "weighted": torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="weighted"),
    "f2": torchmetrics.FBetaScore("multiclass", beta=2.0, num_classes=CLASSES, average="macro"),
    "balanced": torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="macro"),
    "two": torchmetrics.Accuracy("multiclass", num_classes=CLASSES, top_k=2, average="macro"),
    "quadratic": torchmetrics.CohenKappa("multiclass", num_classes=CLASSES, weights="quadratic"),
}

ORDERED = {"two", "quadratic"}
"""In these the order of the classes counts."""


def same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=EQUAL_WITHIN)


def given(name: str) -> Any:
    return {name: (GIVEN[name], "max")} if name in GIVEN else [name]


def test_the_suite_has_every_named_metric_of_classes() -> None:
    of_numbers = {"explained_variance", "mape", "pearson", "r2", "rmse"}
    assert {*NAMED, "calibration_error"} == {*OF_CLASSES, *of_numbers}


@pytest.mark.parametrize("name", [*OF_CLASSES, *sorted(GIVEN.keys() - ORDERED)])
def test_counts_of_classes_in_another_order_are_an_equal_figure(name: str) -> None:
    for counts in COUNTS:
        orders = [np.array(order) for order in permutations(range(CLASSES))]
        found = [measured(given(name), counts[order][:, order]) for order in orders]
        assert all(same(value, found[0]) for value in found), (name, found)


@pytest.mark.parametrize("name", [*OF_CLASSES, *GIVEN])
def test_batches_partitions_and_the_order_of_rows_change_no_figure(name: str) -> None:
    for counts in COUNTS[:2]:
        one = measured(given(name), counts)
        for batch, partitions in ((2, 1), (7, 3), (32, 5)):
            assert same(one, measured(given(name), counts, batch, partitions)), name


@pytest.mark.parametrize("name", [*OF_EACH, *OF_ALL])
@pytest.mark.parametrize("classes", [2, CLASSES])
def test_the_figure_is_that_of_double_precision(name: str, classes: int) -> None:
    for counts in COUNTS:
        counts = counts[:classes, :classes]
        found = measured([name], counts)
        if name in OF_ALL:
            exact = OF_ALL[name](counts)
        else:
            each = OF_EACH[name](*ones(counts))
            exact = float(each[1] if classes == 2 else each.mean())
        assert math.isclose(found, exact, rel_tol=EQUAL_WITHIN, abs_tol=1e-14), (name, counts)


def test_an_objects_figure_is_that_of_double_precision() -> None:
    for counts in COUNTS:
        hit, wrong, missed, _ = ones(counts)
        jaccard = (hit / (hit + wrong + missed)).mean()
        f2 = (5 * hit / (5 * hit + 4 * missed + wrong)).mean()
        weighted = (2 * hit / (2 * hit + wrong + missed)) @ (counts.sum(1) / counts.sum())
        exact = {"jaccard": jaccard, "f2": f2, "weighted": weighted}
        for name, value in exact.items():
            assert same(measured(given(name), counts), float(value)), name


@pytest.mark.parametrize(
    "kind", ["HammingDistance", "HingeLoss", "NegativePredictiveValue", "ExactMatch"]
)
def test_no_other_metric_of_classes_is_rounded_to_single_precision(kind: str) -> None:
    metric = getattr(classification, f"Multiclass{kind}")(num_classes=CLASSES)
    found = [measured({"m": (metric, "max")}, counts) for counts in COUNTS]
    assert any(value != float(np.float32(value)) for value in found)


def test_doubles_come_of_whatever_makes_single_precision_and_only_in_the_block() -> None:
    whole, single = torch.arange(1, 4), torch.ones(3)
    with Doubles(), warnings.catch_warnings():
        warnings.simplefilter("error")
        made = [
            whole.float(),
            whole.to(torch.float32),
            whole.type(torch.float32),
            whole / 3,
            whole.sum(dtype=torch.float32),
            torch.tensor(0.1),
            torch.tensor([whole[0], 0.1]),
            torch.linspace(0, 1, 4),
            torch.zeros(2, dtype=torch.float32),
            torch.from_numpy(np.ones(2, np.float32)) * 3,
            torch.nan_to_num(single / whole),
            torch.sqrt(whole),
            torch.stack([single, single]),
        ]
        assert torch.tensor(0.1).item() == 0.1 and (whole / 3)[0].item() == 1 / 3
        assert whole.sum().dtype is torch.int64 and (whole > 1).dtype is torch.bool
    assert {each.dtype for each in made} == {torch.float64}
    assert (whole / 3).dtype is torch.float32


def test_what_is_written_to_is_no_copy_in_double_precision() -> None:
    single, places = torch.zeros(2), torch.tensor([0, 1])
    with Doubles():
        single.add_(torch.ones(2))
        single[0] = 3.0
        with pytest.raises(RuntimeError, match="same scalar type"):
            single.index_add_(0, places, torch.ones(2))
    assert single.tolist() == [3.0, 1.0]
