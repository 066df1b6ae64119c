"""The numbers of an epoch, merged in partition order so that they never depend on timing."""

from __future__ import annotations

from collections.abc import Iterable
from math import nan

from cerebro_hydra.plan.visits import Sums, Visit


def epoch_metrics(
    visits: Iterable[Visit], sums: dict[int, Sums], custom: dict[str, float]
) -> dict[str, float]:
    """Return "train_loss" and a "val_<name>" for every evaluated name, the custom ones last.

    Sums are added as Python floats (float64) in partition order, then divided by the rows;
    a metric over no rows is NaN.
    """
    trained = sorted(visits, key=lambda visit: visit.partition)
    metrics = {"train_loss": _mean((visit.loss_sum, visit.rows) for visit in trained)}
    evaluated = [sums[partition] for partition in sorted(sums)]
    for name in evaluated[0] if evaluated else ():
        metrics[f"val_{name}"] = _mean(part[name] for part in evaluated)
    return metrics | {f"val_{name}": value for name, value in custom.items()}


def _mean(parts: Iterable[tuple[float, int]]) -> float:
    total, rows = 0.0, 0
    for part, count in parts:
        total += part
        rows += count
    return total / rows if rows else nan
