"""Collects what each partition measures in a form that can be merged, and merges it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cerebro_hydra.errors import NonFiniteLoss
from cerebro_hydra.recipe.metrics import Metric, merge_metrics
from cerebro_hydra.recipe.recipe import Recipe

SumOverRows = tuple[float, int]
"""A mean that can still be merged: the sum of a value over rows, and the number of rows."""


@dataclass(frozen=True)
class Evaluation:
    """Holds what the validation rows of one partition gave.

    `sums` has the loss and every averaged metric, `states` those metrics that keep a state.
    """

    sums: dict[str, SumOverRows]
    states: dict[str, Any]


@dataclass
class RunningEvaluation:
    """Sums up the batches of one partition that were evaluated so far."""

    recipe: Recipe
    batches: int = 0
    rows: int = 0
    totals: dict[str, float] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)

    def add(self, loss: float, outputs: Any, targets: Sequence[Tensor], rows: int) -> None:
        """Add a batch with its mean loss, and measure its metrics.

        Raises:
            NonFiniteLoss: the loss is NaN or infinite.
        """
        values = {"loss": loss} | self.recipe.compute_metrics(outputs, targets)
        self.recipe.update_states(self.states, outputs, targets)
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"the validation loss of batch {self.batches} is {loss}")
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + value * rows
        self.batches += 1
        self.rows += rows

    def result(self) -> Evaluation:
        """Return what all batches gave."""
        return Evaluation({n: (total, self.rows) for n, total in self.totals.items()}, self.states)


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
