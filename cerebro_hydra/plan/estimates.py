"""Estimates how long tasks take, learning from the seconds that events report.

This is the only notion of time that the decisions have.
"""

from __future__ import annotations

from array import array
from math import isnan, nan

from cerebro_hydra.plan.progress import TaskKind

KINDS: tuple[TaskKind, ...] = ("train", "evaluate")


class Estimates:
    """Estimates seconds per (kind, trial, partition), and keeps a clock that follows the events.

    A duration is modelled as cost(trial) x pace(partition) until that very pair was measured. The
    prior is the trial's relative cost at pace 1; the first measurement says what its unit is. An
    evaluation starts at a third of a sub-epoch, the share of a forward pass.
    """

    def __init__(self, partitions: int) -> None:
        self.now = 0.0
        self._partitions = partitions
        self._unit = 1.0  # seconds per unit of the trials' relative costs
        self._has_seen_any = False
        self._cost: dict[TaskKind, dict[int, float]] = {kind: {} for kind in KINDS}
        self._pace: dict[TaskKind, list[float]] = {kind: [1.0] * partitions for kind in KINDS}
        # By trial, from its first measurement on: the seconds by partition, NaN where unknown.
        self._seen: dict[TaskKind, dict[int, array[float]]] = {kind: {} for kind in KINDS}

    def add(self, trial: int, cost: float) -> None:
        """Take in a trial by the relative cost of one of its sub-epochs."""
        self._cost["train"][trial] = cost * self._unit
        self._cost["evaluate"][trial] = cost / 3 * self._unit

    def cost(self, kind: TaskKind, trial: int) -> float:
        """Return the relative cost of one task of a trial; its unit never changes."""
        return self._cost[kind][trial] / self._unit

    def pace(self, kind: TaskKind, partition: int) -> float:
        """Return how long tasks of cost 1 take on a partition, in any unit."""
        return self._pace[kind][partition]

    def seconds(self, kind: TaskKind, trial: int, partition: int) -> float:
        """Return the expected duration of a task."""
        seen = self._seen[kind].get(trial)
        if seen is not None and not isnan(known := seen[partition]):
            return known
        return self._modelled(kind, trial, partition)

    def learn(self, kind: TaskKind, trial: int, partition: int, seconds: float) -> None:
        """Update the estimates with a measured duration."""
        if not seconds > 0:
            return
        error = seconds / self._modelled(kind, trial, partition)
        if self._has_seen_any:  # cost and pace share the error equally
            self._cost[kind][trial] *= error**0.5
            self._pace[kind][partition] *= error**0.5
        else:
            self._has_seen_any = True
            self._unit = error
            for costs in self._cost.values():
                costs.update({each: cost * error for each, cost in costs.items()})
        seen = self._seen[kind]
        if trial not in seen:
            seen[trial] = array("d", [nan]) * self._partitions
        seen[trial][partition] = seconds

    def advance_clock(self, moment: float) -> None:
        """Advance the clock to the moment at which a task ended, if that is later."""
        self.now = max(self.now, moment)

    def comparable(self) -> dict[str, object]:
        """Return everything that the estimates depend on, for comparisons."""
        seen = {
            kind: {trial: [None if isnan(each) else each for each in row] for trial, row in rows}
            for kind, rows in ((kind, by_trial.items()) for kind, by_trial in self._seen.items())
        }
        return {
            "now": self.now,
            "unit": self._unit,
            "cost": {kind: dict(costs) for kind, costs in self._cost.items()},
            "pace": {kind: list(paces) for kind, paces in self._pace.items()},
            "seen": seen,
        }

    def _modelled(self, kind: TaskKind, trial: int, partition: int) -> float:
        return self._cost[kind][trial] * self._pace[kind][partition]
