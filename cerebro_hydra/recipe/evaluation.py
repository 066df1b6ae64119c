"""What each partition measures, in a form that can be merged, and how it is merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cerebro_hydra.recipe.metrics import Metric, merge_metrics

SumOverRows = tuple[float, int]
"""A mean that can still be merged: the sum of a value over rows, and the number of rows."""


@dataclass(frozen=True)
class Evaluation:
    """What the validation rows of one partition gave.

    `sums` has the loss and every averaged metric, `states` those metrics that keep a state.
    """

    sums: dict[str, SumOverRows]
    states: dict[str, Any]


def mean(sums: Iterable[SumOverRows]) -> float:
    """Merge sums over rows, in float64 and in the order given."""
    total, count = 0.0, 0
    for value, rows in sums:
        total, count = total + value, count + rows
    return total / count


def merge_evaluations(
    state_metrics: Sequence[Metric], parts: Sequence[Evaluation]
) -> dict[str, float]:
    """Merge what all partitions gave, in partition order, into one value per measured name."""
    names = dict.fromkeys(name for part in parts for name in part.sums)
    merged = {name: mean(p.sums[name] for p in parts if name in p.sums) for name in names}
    if parts:
        merged |= merge_metrics(state_metrics, [part.states for part in parts])
    return merged
