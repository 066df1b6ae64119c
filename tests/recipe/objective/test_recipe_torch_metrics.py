"""Metrics of torchmetrics: partitions together give the figure of all rows at once."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torchmetrics import classification, regression

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, merge_metrics, resolve_metrics
from tests.recipe.small_recipes import recipe_of

ROWS = 403
GENERATOR = torch.Generator().manual_seed(5)
LOGITS = torch.randn(ROWS, 1, generator=GENERATOR) * 2
YES = (torch.rand(ROWS, generator=GENERATOR) < LOGITS[:, 0].sigmoid()).float()
CLASSES = torch.randint(0, 4, (ROWS,), generator=GENERATOR)
OF_CLASSES = torch.randn(ROWS, 4, generator=GENERATOR) + nn.functional.one_hot(CLASSES, 4)
NUMBERS = torch.randn(ROWS, 1, generator=GENERATOR) + 3
TRUTH = NUMBERS[:, 0] * 1.5 + torch.randn(ROWS, generator=GENERATOR)

BINARY = (nn.BCEWithLogitsLoss(), LOGITS, YES)
SEVERAL = (nn.CrossEntropyLoss(), OF_CLASSES, CLASSES)
REAL = (nn.MSELoss(), NUMBERS, TRUTH)
GIVEN = [
    (BINARY, classification.BinaryF1Score()),
    (BINARY, classification.BinaryAUROC(thresholds=100)),
    (BINARY, classification.BinaryMatthewsCorrCoef()),
    (SEVERAL, torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro")),
    (SEVERAL, torchmetrics.Recall(task="multiclass", num_classes=4, average="weighted")),
    (SEVERAL, torchmetrics.MatthewsCorrCoef(task="multiclass", num_classes=4)),
    (SEVERAL, torchmetrics.AUROC(task="multiclass", num_classes=4, thresholds=50)),
    (SEVERAL, classification.MulticlassAveragePrecision(4, thresholds=50)),
    (REAL, torchmetrics.R2Score()),
    (REAL, torchmetrics.MeanSquaredError()),
    (REAL, torchmetrics.PearsonCorrCoef()),
    (REAL, torchmetrics.ExplainedVariance()),
    (REAL, regression.CriticalSuccessIndex(0.5)),
]


def measured(metrics: Any, case: Any, partitions: int, batch: int) -> dict[str, float]:
    loss, outputs, labels = case
    recipe = recipe_of(loss=loss, metrics=metrics).bind(Columns(("x",), ("y",)))
    states = []
    for number in range(partitions):
        states.append(state := dict[str, Any]())
        first, end = (ROWS * at**2 // partitions**2 for at in (number, number + 1))
        for place in range(first, end, batch):  # two scores may both look like likelihoods
            rows = slice(place, min(place + batch, end))
            recipe.update_states(state, outputs[rows], (labels[rows],))
    return merge_metrics(recipe.state_metrics, states)


def seen_at_once(case: Any, metric: torchmetrics.Metric) -> float:
    """Return what torchmetrics makes of all rows in one process, given the numbers it asks for."""
    loss, outputs, labels = case
    if isinstance(loss, nn.MSELoss):
        return float(metric.set_dtype(torch.float64)(outputs[:, 0].double(), labels.double()))
    if isinstance(loss, nn.CrossEntropyLoss):
        return float(metric(outputs.softmax(1), labels))
    return float(metric(outputs[:, 0].sigmoid(), labels.long()))


@pytest.mark.parametrize("number", range(len(GIVEN)))
def test_any_partitions_and_batches_give_the_figure_of_all_rows_at_once(number: int) -> None:
    case, metric = GIVEN[number]
    (one,) = measured({"m": (metric, "max")}, case, 1, ROWS).values()
    assert math.isclose(one, seen_at_once(case, metric.clone()), rel_tol=1e-5)
    for partitions, batch in ((2, 16), (3, 2), (5, ROWS)):
        (found,) = measured({"m": (metric, "max")}, case, partitions, batch).values()
        if case is REAL:
            assert math.isclose(found, one, rel_tol=1e-12)
        else:
            assert found == one, "counts are exact"


EXACT = {
    "f1": torchmetrics.functional.classification.binary_f1_score,
    "precision": torchmetrics.functional.classification.binary_precision,
    "recall": torchmetrics.functional.classification.binary_recall,
    "specificity": torchmetrics.functional.classification.binary_specificity,
    "matthews": torchmetrics.functional.classification.binary_matthews_corrcoef,
    "cohen_kappa": torchmetrics.functional.classification.binary_cohen_kappa,
    "calibration_error": torchmetrics.functional.classification.binary_calibration_error,
    "auroc": torchmetrics.functional.classification.binary_auroc,
    "average_precision": torchmetrics.functional.classification.binary_average_precision,
}


@pytest.mark.parametrize("two_outputs", [False, True])
def test_named_metrics_of_two_classes_are_of_class_1_whatever_the_loss(two_outputs: bool) -> None:
    case = BINARY
    if two_outputs:
        case = nn.CrossEntropyLoss(), torch.cat([-LOGITS / 2, LOGITS / 2], 1), YES.long()
    names = [name for name in EXACT if name != "calibration_error" or not two_outputs]
    found = measured(names, case, 3, 7)  # some batches of 7 have no logit outside of 0..1
    for name in names:
        exact = float(EXACT[name](LOGITS[:, 0].sigmoid(), YES.long()))
        binned = name in ("auroc", "average_precision")
        assert math.isclose(found[name], exact, rel_tol=2e-3 if binned else 1e-6), name


def test_named_metrics_of_several_classes_are_means_over_them() -> None:
    names = ["f1", "precision", "recall", "auroc", "calibration_error", "specificity"]
    found = measured(names, SEVERAL, 3, 7)
    exact = torchmetrics.functional.classification
    likelihoods = OF_CLASSES.softmax(1)
    f1 = exact.multiclass_f1_score(likelihoods, CLASSES, 4, average="macro")
    auroc = exact.multiclass_auroc(likelihoods, CLASSES, 4)
    error = exact.multiclass_calibration_error(likelihoods, CLASSES, 4)
    assert math.isclose(found["f1"], float(f1), rel_tol=1e-6)
    assert math.isclose(found["auroc"], float(auroc), rel_tol=2e-3)
    assert math.isclose(found["calibration_error"], float(error), rel_tol=1e-5)


def test_named_metrics_of_numbers() -> None:
    found = measured(["r2", "rmse", "mape", "pearson"], REAL, 3, 7)
    exact = torchmetrics.functional
    numbers = NUMBERS[:, 0].double(), TRUTH.double()
    assert math.isclose(found["r2"], float(exact.r2_score(*numbers)), rel_tol=1e-12)
    rmse = exact.mean_squared_error(*numbers, squared=False)
    assert math.isclose(found["rmse"], float(rmse), rel_tol=1e-12)


def test_directions_are_the_metrics_own_and_names_are_of_label_columns() -> None:
    metrics = {
        "f1": classification.BinaryF1Score(),
        "error": torchmetrics.MeanSquaredError(),
        "share": (torchmetrics.MeanAbsoluteError(), "max"),
        "hits": "accuracy",
    }
    found = resolve_metrics(metrics, ("a", "b"))
    assert [(m.name, m.direction, m.label) for m in found] == [
        (f"{label}_{name}", direction, number)
        for name, direction in (("f1", "max"), ("error", "min"), ("share", "max"), ("hits", "max"))
        for number, label in enumerate("ab")
    ]


class NoBetter(torchmetrics.MeanMetric):
    higher_is_better = None


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (NoBetter(), r"NoBetter, whose higher_is_better is None; say .*'m': \(NoBetter\(.*'max'"),
        (torchmetrics.F1Score, r"is the class F1Score; give one metric .* that is made"),
        (torchmetrics.MetricCollection([NoBetter()]), r"is a MetricCollection; give one"),
        (torchmetrics.MinMaxMetric(NoBetter()), r"is a MinMaxMetric, which wraps other metrics"),
        (classification.BinaryAUROC(), r"BinaryAUROC that keeps every row .*thresholds=200"),
        (classification.BinaryCalibrationError(), r"\['confidences', .*\['calibration_error'\]"),
        (torchmetrics.SpearmanCorrCoef(), r"keeps every row .*give an object with start"),
    ],
)
def test_what_can_not_be_merged_or_ranked_is_refused_with_a_remedy(metric: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"metric 'm' .*{said}"):
        resolve_metrics({"m": metric})


def test_a_metric_with_a_value_per_class_is_refused() -> None:
    metric = torchmetrics.F1Score(task="multiclass", num_classes=4, average=None)
    with pytest.raises(ConfigurationError, match=r"MulticlassF1Score gives shape \(4,\).*'macro'"):
        measured({"m": metric}, SEVERAL, 1, ROWS)


def test_a_name_without_torchmetrics_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ConfigurationError, match=r"'f1' .*not installed; .*\[torchmetrics\]"):
        resolve_metrics(["f1"])
    assert resolve_metrics(["accuracy"])[0].name == "accuracy"


@pytest.mark.parametrize("ignored", [-100, 2])
def test_labels_that_the_loss_ignores_are_left_out_and_no_rows_give_nan(ignored: int) -> None:
    labels: Tensor = CLASSES.clone()
    labels[::3] = ignored
    kept = labels != ignored
    loss, outputs = nn.CrossEntropyLoss(ignore_index=ignored), SEVERAL[1]
    for name in ("f1", "calibration_error"):
        (found,) = measured([name], (loss, outputs, labels), 2, 16).values()
        recipe = recipe_of(loss=loss, metrics=[name]).bind(Columns(("x",), ("y",)))
        recipe.update_states(state := {}, outputs[kept], (labels[kept],))
        (alone,) = merge_metrics(recipe.state_metrics, [state]).values()
        assert math.isclose(found, alone, rel_tol=1e-12)
        empty = [{name: metric.function.start()} for metric in recipe.state_metrics]
        assert math.isnan(merge_metrics(recipe.state_metrics, empty)[name])
