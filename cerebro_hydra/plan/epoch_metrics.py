"""Merges the metrics of an epoch in partition order, so that they never depend on timing."""

from __future__ import annotations

from collections.abc import Iterable
from math import nan

from cerebro_hydra.plan.events import EvaluationDone
from cerebro_hydra.plan.progress import CommittedVisit


def epoch_metrics(
    visits: Iterable[CommittedVisit], evaluated: dict[int, EvaluationDone], custom: dict[str, float]
) -> dict[str, float]:
    """Return "train_loss" and a "val_<name>" for every evaluated metric, the custom ones last.

    Sums are added as Python floats (float64) in partition order and then divided by the rows. The
    mean over no rows is NaN.
    """
    trained = sorted(visits, key=lambda visit: visit.partition)
    metrics = {"train_loss": _mean((visit.loss_sum, visit.rows) for visit in trained)}
    sums = [evaluated[partition].sums for partition in sorted(evaluated)]
    for name in sums[0] if sums else ():
        metrics[f"val_{name}"] = _mean(by_name[name] for by_name in sums)
    return metrics | {f"val_{name}": value for name, value in custom.items()}


def _mean(sums_and_rows: Iterable[tuple[float, int]]) -> float:
    total, total_rows = 0.0, 0
    for value, rows in sums_and_rows:
        total += value
        total_rows += rows
    return total / total_rows if total_rows else nan
