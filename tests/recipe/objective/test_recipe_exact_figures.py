"""Metrics are the same figures however rows are parted into batches and partitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cerebro_hydra.data.batches import Batch
from cerebro_hydra.plan.hop.ranking import EQUAL_WITHIN
from cerebro_hydra.plan.hop.trials import Evaluation, epoch_metrics
from cerebro_hydra.recipe import Columns, PlainTrainer, Recipe, merge_evaluations
from cerebro_hydra.recipe.objective.metrics import sum_over_rows

ROWS, HITS = 359, 344
PARTINGS = [(size, parts) for size in (1, 7, 32, 100, ROWS) for parts in (1, 2, 3, 5)]


def measured(
    outputs: Tensor, labels: Tensor, loss: Any, metric: Any, size: int, parts: int
) -> float:
    """Evaluate a model that gives these outputs; replay and the run must agree on the figure."""
    model = nn.Sequential(nn.Identity(), nn.Linear(1, 1))[:1]
    model.unused = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    name, given = (metric, [metric]) if isinstance(metric, str) else ("own", {"own": metric})
    recipe = Recipe(model, optimizer, loss, metrics=given)
    trainer = PlainTrainer(recipe.bind(Columns(("x",), ("y",))), 0, 1)
    borders = [len(labels) * part // parts for part in range(parts + 1)]
    found = []
    for first, last in pairwise(borders):
        ends = [*range(first, last, size), last]
        batches = [Batch((outputs[a:b],), (labels[a:b],), b - a) for a, b in pairwise(ends)]
        found.append(trainer.evaluate(batches))
    if recipe.state_metrics:
        return merge_evaluations(recipe.state_metrics, found)[name]
    evaluation = Evaluation()
    for partition in reversed(range(parts)):  # in any order
        evaluation.add(partition, found[partition].sums, None)
    of_run = epoch_metrics([], evaluation, {})[f"val_{name}"]
    assert repr(merge_evaluations([], found)[name]) == repr(of_run)
    return of_run


def rows(seed: int, *shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("size", "parts"), PARTINGS)
def test_accuracy_is_hits_over_rows_in_any_batches_and_partitions(size: int, parts: int) -> None:
    outputs = rows(0, 3)
    labels = outputs.argmax(1)
    wrong = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[: ROWS - HITS]
    labels[wrong] = (labels[wrong] + 1) % 3
    found = measured(outputs, labels, nn.CrossEntropyLoss(), "accuracy", size, parts)
    assert found == HITS / ROWS


def hits(dtype: torch.dtype, as_number: bool) -> Any:
    """Return the share of hits as users write it: a mean in some precision, or its `item()`."""

    def share(outputs: Tensor, labels: Tensor) -> Any:
        mean = (outputs.argmax(1) == labels).to(dtype).mean()
        return mean.item() if as_number else mean

    return share, "max"


@pytest.mark.parametrize("as_number", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_share_of_hits_by_a_function_of_the_user_is_hits_over_rows(
    dtype: torch.dtype, as_number: bool
) -> None:
    outputs = rows(0, 3)
    labels = outputs.argmax(1)
    wrong = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[: ROWS - HITS]
    labels[wrong] = (labels[wrong] + 1) % 3
    given = hits(dtype, as_number)
    found = {measured(outputs, labels, nn.CrossEntropyLoss(), given, *each) for each in PARTINGS}
    assert found == {HITS / ROWS}


@pytest.mark.parametrize("scale", [1, 100])
@pytest.mark.parametrize("as_number", [False, True])
def test_a_share_of_errors_that_is_1_less_one_of_hits_is_errors_over_rows(
    as_number: bool, scale: int
) -> None:
    outputs = rows(0, 3)
    labels = outputs.argmax(1)
    wrong = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[: ROWS - HITS]
    labels[wrong] = (labels[wrong] + 1) % 3
    share, _ = hits(torch.float32, as_number)
    given = lambda outputs, labels: scale - scale * share(outputs, labels), "min"
    found = {measured(outputs, labels, nn.CrossEntropyLoss(), given, *each) for each in PARTINGS}
    assert found == {scale * (ROWS - HITS) / ROWS}


SPELLINGS: dict[str, tuple[int, Callable[[torch.Tensor], Any]]] = {
    "a percentage of one number": (100, lambda hit: hit.float().mean().item() * 100),
    "a percentage of a tensor": (100, lambda hit: (hit.float().mean() * 100).item()),
    "by the percentage of a row": (100, lambda hit: hit.float().sum().mul_(100.0 / len(hit))),
    "a percentage of hits": (100, lambda hit: 100.0 * hit.sum().item() / len(hit)),
    "one less": (1, lambda hit: hit.float().mean() - 1),
    "a negative": (1, lambda hit: -hit.float().mean()),
    "errors of a percentage": (100, lambda hit: 100 - hit.float().sum().mul_(100.0 / len(hit))),
    "errors of a number": (100, lambda hit: 100 - 100 * hit.sum().item() / len(hit)),
    "a percentage of errors": (100, lambda hit: 100 * (1 - hit.float().mean())),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_share_is_a_whole_number_by_rows_however_it_is_computed(spelling: str) -> None:
    scale, share = SPELLINGS[spelling]
    for count in (1, 7, 45, 97, 359, 921):
        for hits in range(count + 1):
            hit = torch.arange(count) < hits
            total, _ = sum_over_rows(share(hit), count)
            assert total / scale in {hits, count - hits, -hits, hits - count}, (count, hits)


@pytest.mark.parametrize("value", [0.123456789, 3.0001, 1e9 + 0.3, -2.7, 1e-9, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mean_is_changed_by_no_more_than_it_was_rounded_by(
    value: float, dtype: torch.dtype
) -> None:
    mean = torch.tensor(value, dtype=dtype)
    total, count = sum_over_rows(mean, 12)
    assert count == 12
    assert math.isclose(total / 12, float(mean), rel_tol=torch.finfo(dtype).eps)


def test_a_small_mean_over_many_rows_is_no_share() -> None:
    for value in (5.011e-05, 4.99e-05):
        mean = torch.tensor(value)
        assert sum_over_rows(mean, 20_000) == (float(mean) * 20_000, 20_000)


@pytest.mark.parametrize("metric", ["mse", "mae"])
def test_errors_differ_by_less_than_what_counts_as_better(metric: str) -> None:
    outputs, labels = rows(2, 1), rows(3, 1)
    exact = Fraction(0)
    for error in (outputs - labels).abs().flatten().tolist():
        exact += Fraction(error) ** 2 if metric == "mse" else Fraction(error)
    loss = nn.MSELoss()
    for size, parts in PARTINGS:
        found = measured(outputs, labels, loss, metric, size, parts)
        assert math.isclose(found, exact / ROWS, rel_tol=EQUAL_WITHIN / 10)


def test_accuracy_of_no_label_is_no_number() -> None:
    outputs, labels = torch.zeros(2, 3, 0), torch.zeros(2, 0, dtype=torch.int64)
    loss = lambda outputs, labels: outputs.sum()  # noqa: E731
    assert math.isnan(measured(outputs, labels, loss, "accuracy", 2, 1))


@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize(("size", "parts"), PARTINGS)
def test_accuracy_leaves_out_the_labels_that_the_loss_ignores(
    ignored: int, size: int, parts: int
) -> None:
    loss = nn.CrossEntropyLoss(ignore_index=ignored, reduction="sum")  # of no label it is 0
    outputs = rows(0, 3)
    labels = rows(1, 3).argmax(1)
    labels[: ROWS // 2] = ignored  # whole batches and partitions have no other label
    counted = labels != ignored
    hits = int((outputs.argmax(1) == labels)[counted].sum())
    assert measured(outputs, labels, loss, "accuracy", size, parts) == hits / int(counted.sum())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy, partial(F.cross_entropy)])
@pytest.mark.parametrize("name", ["accuracy", "recall"])
def test_classes_are_where_the_loss_has_them_though_the_last_dimension_fits_the_labels(
    name: str, loss: Any
) -> None:
    """As of a text of four words and four tags."""
    outputs = rows(4, 4, 4)
    labels = outputs.argmax(1)
    assert measured(outputs, labels, loss, name, 100, 2) == 1.0


@pytest.mark.parametrize("name", ["f1", "auroc", "calibration_error"])
@pytest.mark.parametrize("as_likelihoods", [True, False])
def test_scores_for_a_loss_of_the_users_own_have_one_figure_whatever_the_batches(
    name: str, as_likelihoods: bool
) -> None:
    """Some batches of logits have none outside of 0 and 1."""
    outputs, labels = rows(5) / 2 + 0.3, rows(6).gt(0).long()
    own = F.binary_cross_entropy if as_likelihoods else F.binary_cross_entropy_with_logits
    outputs = outputs.sigmoid() if as_likelihoods else outputs
    known = measured(outputs, labels, own, name, ROWS, 1)
    for parting in ((4, 2), (100, 3), (ROWS, 1)):
        found = measured(outputs, labels, lambda o, y: own(o, y.float()), name, *parting)
        assert math.isclose(found, known, rel_tol=EQUAL_WITHIN)


def test_options_of_a_loss_of_torch_change_nothing_of_what_its_outputs_are() -> None:
    outputs, labels = rows(7).sigmoid(), rows(8).gt(0).float()
    hits = float(((outputs > 0.5) == labels).double().mean())
    loss = partial(F.binary_cross_entropy, reduction="mean")
    assert math.isclose(measured(outputs, labels, loss, "accuracy", 7, 3), hits)
    scores, classes = rows(9, 3), rows(10, 3).argmax(1)
    ignoring = partial(F.cross_entropy, ignore_index=1, reduction="sum")
    expected = float((scores.argmax(1) == classes)[classes != 1].double().mean())
    assert math.isclose(measured(scores, classes, ignoring, "accuracy", 7, 3), expected)
