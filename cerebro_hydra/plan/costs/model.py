"""The one model of what a run costs beside its shard tasks, and by how much those differ.

What tasks take and need is measured when a trial is admitted (`ShardSpec`). What a run's events say
corrects it: `measured` in ``plan/costs/measured.py`` makes a model of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Literal

from cerebro_hydra.plan.costs.moves import FREE_MOVES, MoveRates

Kind = Literal["train", "evaluate"]

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


@dataclass(frozen=True, slots=True)
class CostModel:
    """Holds seconds and speeds, each with its spread where it was measured several times.

    Args:
        rates: of moves and hops.
        start: from the begin of a run until its first worker has joined.
        later: from then until another worker has joined.
        devices: from the first task of a worker, and its shards, to its first forward; meanwhile
            its devices start.
        admission: of a candidate while others train; of the first one of its structure.
        admission_again: of a candidate whose structure was admitted before.
        build: from the moment at which a worker has a task and its shards to its first forward,
            where it has the trial for the first time.
        turn: the same where it has had the trial before.
        pace: what a task took for each second of its profile, by structure and kind.
        lag: what a whole run took for each second that all of these explain.
    """

    rates: MoveRates = FREE_MOVES
    start: Spread = NOTHING
    later: Spread = NOTHING
    devices: Spread = NOTHING
    admission: Spread = NOTHING
    admission_again: Spread = NOTHING
    build: Spread = NOTHING
    turn: Spread = NOTHING
    pace: Mapping[tuple[str, Kind], Spread] = field(default_factory=dict)
    lag: float = 1.0

    def pace_of(self, structure: str, kind: Kind) -> float:
        """Return what a task takes for each second of its profile, without a measurement the lag.

        A kind of tasks that was not measured goes at the pace of the other one.
        """
        other: Kind = "evaluate" if kind == "train" else "train"
        for each in (kind, other):
            if spread := self.pace.get((structure, each)):
                return self.lag * spread.mean
        return self.lag

    def waits(self, first: bool) -> float:
        """Return the seconds before a task's first forward beside those for its shards."""
        return (self.build if first and self.build.count else self.turn).mean

    def to_json(self) -> dict[str, Any]:
        """Describe the model in JSON; unlimited speeds are null."""
        spreads = {name: asdict(getattr(self, name)) for name in _SPREADS}
        pace = [[*key, asdict(spread)] for key, spread in sorted(self.pace.items())]
        rates = {name: None if rate == inf else rate for name, rate in asdict(self.rates).items()}
        return {"rates": rates, **spreads, "pace": pace, "lag": self.lag}


_SPREADS = ("start", "later", "devices", "admission", "admission_again", "build", "turn")
