"""Gathers what an epoch's evaluations measure, and merges it so that it never depends on timing."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import nan
from typing import Any

from cerebro_hydra.plan.bits import mask_of
from cerebro_hydra.plan.visit_log import CommittedVisit


class Evaluation:
    """Holds the (sum, rows) of every metric by partition, in twenty bytes each."""

    __slots__ = ("_order", "_rows", "_sums", "done", "states")

    def __init__(self) -> None:
        self.done = 0
        """The partitions that are evaluated, as a mask."""
        self.states: dict[int, dict[str, Any]] = {}
        """What custom metrics computed, by partition; empty without custom metrics."""
        self._order = array("I")
        self._sums: dict[str, array[float]] = {}
        self._rows: dict[str, array[int]] = {}

    def add(
        self, partition: int, sums: dict[str, tuple[float, int]], states: dict[str, Any] | None
    ) -> None:
        """Add what was measured on one partition."""
        self.done |= 1 << partition
        self._order.append(partition)
        for name, (value, rows) in sums.items():
            self._sums.setdefault(name, array("d")).append(value)
            self._rows.setdefault(name, array("Q")).append(rows)
        if states is not None:
            self.states[partition] = states

    def merged(self) -> dict[str, float]:
        """Return the mean of every metric over all rows, added up in partition order."""
        in_order = sorted(range(len(self._order)), key=self._order.__getitem__)
        return {
            name: _mean((sums[at], self._rows[name][at]) for at in in_order)
            for name, sums in self._sums.items()
        }

    def comparable(self) -> object:
        """Return everything that was measured, for comparisons."""
        return list(self._order), {name: list(sums) for name, sums in self._sums.items()}

    def check(self) -> None:
        """Raise AssertionError if the mask is not that of what was added."""
        assert self.done == mask_of(self._order), f"{self.done:b} are not {list(self._order)}"


def epoch_metrics(
    visits: Sequence[CommittedVisit], evaluation: Evaluation, custom: dict[str, float]
) -> dict[str, float]:
    """Return "train_loss" and a "val_<name>" for every evaluated metric, the custom ones last.

    Sums are added as Python floats (float64) in partition order and then divided by the rows. The
    mean over no rows is NaN.
    """
    trained = sorted(visits, key=lambda visit: visit.partition)
    metrics = {"train_loss": _mean((visit.loss_sum, visit.rows) for visit in trained)}
    validated = evaluation.merged() | custom
    return metrics | {f"val_{name}": value for name, value in validated.items()}


def _mean(sums_and_rows: Iterable[tuple[float, int]]) -> float:
    total, total_rows = 0.0, 0
    for value, rows in sums_and_rows:
        total += value
        total_rows += rows
    return total / total_rows if total_rows else nan
