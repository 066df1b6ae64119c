"""Compares what was measured: which epoch of a trial is its best, and which trial of a search.

One rule is asked by everything that compares: which state a trial keeps, when it stops early, which
trial wins, and how tables list trials best first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cmp_to_key
from math import inf, isclose, isfinite, isnan, nan
from typing import NamedTuple

EQUAL_WITHIN = 1e-12
"""Values are equal that differ by at most this part of the larger one. Sums in float64, which
depend on the order of batches and partitions, differ by less; two shares of rows by more."""

TIE_BREAK = "val_loss"
"""The measured name that decides between equal values; less is better."""


class Measured(NamedTuple):
    """Holds what an epoch of a trial measured; neither number is NaN."""

    value: float
    loss: float
    epoch: int
    trial: int = 0

    @classmethod
    def of(
        cls, metrics: Mapping[str, float], metric: str, epoch: int, trial: int = 0
    ) -> Measured | None:
        """Take the value of ``metric``, or None if it is NaN or was not measured."""
        value, loss = metrics.get(metric, nan), metrics.get(TIE_BREAK, nan)
        return None if isnan(value) else cls(value, inf if isnan(loss) else loss, epoch, trial)


def is_better(one: Measured, other: Measured, direction: str) -> bool:
    """Tell whether one of two is better; ``direction`` is "min" or "max".

    A finite value is better than an infinite one, into which a measure has overflowed, and two
    infinite ones are equal. Of equal values the better one has the better validation loss; if that
    is equal too, the earlier epoch, and then the lower trial.
    """
    if (is_finite := isfinite(one.value)) != isfinite(other.value):
        return is_finite
    if is_finite and not isclose(one.value, other.value, rel_tol=EQUAL_WITHIN):
        return (one.value > other.value) == (direction == "max")
    if not isclose(one.loss, other.loss, rel_tol=EQUAL_WITHIN):
        return one.loss < other.loss
    return (one.epoch, one.trial) < (other.epoch, other.trial)


def ranked(measured: Iterable[Measured], direction: str) -> list[Measured]:
    """Return them best first."""

    def compare(one: Measured, other: Measured) -> int:
        return is_better(other, one, direction) - is_better(one, other, direction)

    return sorted(measured, key=cmp_to_key(compare))


def best_epoch(history: Iterable[Mapping[str, float]], metric: str, direction: str) -> int | None:
    """Return the epoch with the best finite value of ``metric``, or None if there is none.

    An epoch is compared with the best one before it. So the best of a longer history is the same or
    a later one, and a trial needs no state again that it has dropped.
    """
    best: Measured | None = None
    for epoch, metrics in enumerate(history):
        found = Measured.of(metrics, metric, epoch)
        if found is None or not isfinite(found.value):
            continue
        if best is None or is_better(found, best, direction):
            best = found
    return None if best is None else best.epoch
