"""A spread tells what something cost each time that it was measured, in a few numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LOW, HIGH = 0.1, 0.9
"""The quantiles that a spread tells."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Holds mean, median and two quantiles of what was measured; all are 0 if nothing was.

    Args:
        count: how often it was measured.
    """

    mean: float = 0.0
    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, measured: Iterable[float], weights: Iterable[float] | None = None) -> Spread:
        """Return the spread of what was measured; weights count in the mean alone."""
        values = list(measured)
        if not values:
            return NOTHING
        parts = [1.0] * len(values) if weights is None else list(weights)
        mean = sum(v * w for v, w in zip(values, parts, strict=True)) / sum(parts)
        values.sort()
        low, median, high = (_quantile(values, share) for share in (LOW, 0.5, HIGH))
        return cls(mean, median, low, high, len(values))


NOTHING = Spread()
"""That of what was never measured."""


def _quantile(values: list[float], share: float) -> float:
    """Return a quantile of sorted values, between two of them where it lies there."""
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)
