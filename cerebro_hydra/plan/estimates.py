"""Estimates how long tasks take, learning from the seconds that events report.

This is the only notion of time that the decisions have.
"""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.progress import TaskKind

SecondsTable = dict[TaskKind, list[list[float]]]  # expected seconds, by kind, trial and partition


class Estimates:
    """Estimates seconds per (kind, trial, partition), and keeps a clock that follows the events.

    A duration is modelled as cost(trial) x pace(partition) until that very pair was measured. The
    prior is the trial's relative cost at pace 1. An evaluation starts at a third of a sub-epoch,
    the share of a forward pass.
    """

    def __init__(self, costs: Sequence[float], partitions: int) -> None:
        self.now = 0.0
        self._cost: dict[TaskKind, list[float]] = {
            "train": list(costs),
            "evaluate": [cost / 3 for cost in costs],
        }
        self._pace: dict[TaskKind, list[float]] = {
            "train": [1.0] * partitions,
            "evaluate": [1.0] * partitions,
        }
        self._seen: dict[TaskKind, list[list[float | None]]] = {
            kind: [[None] * partitions for _ in costs] for kind in self._cost
        }
        self._has_seen_any = False
        self.seconds: SecondsTable = {
            kind: [[cost] * partitions for cost in costs] for kind, costs in self._cost.items()
        }
        """The expected duration of every task, by kind, trial and partition; only to be read."""

    def learn(self, kind: TaskKind, trial: int, partition: int, seconds: float) -> None:
        """Update the estimates with a measured duration."""
        if not seconds > 0:
            return
        costs, paces, seen = self._cost[kind], self._pace[kind], self._seen[kind]
        error = seconds / (costs[trial] * paces[partition])
        if not self._has_seen_any:  # the unit of the costs becomes seconds
            self._has_seen_any = True
            for each, known in self._cost.items():
                known[:] = [cost * error for cost in known]
                self.seconds[each] = [[cost] * len(paces) for cost in known]
        else:  # cost and pace share the error equally
            costs[trial] *= error**0.5
            paces[partition] *= error**0.5
        seen[trial][partition] = seconds

        table = self.seconds[kind]
        for number, pace in enumerate(paces):
            if seen[trial][number] is None:
                table[trial][number] = costs[trial] * pace
        for row, known_row, cost in zip(table, seen, costs, strict=True):
            if known_row[partition] is None:
                row[partition] = cost * paces[partition]
        table[trial][partition] = seconds

    def advance_clock(self, moment: float) -> None:
        """Advance the clock to the moment at which a task ended, if that is later."""
        self.now = max(self.now, moment)

    def comparable(self) -> dict[str, object]:
        """Return everything that the estimates depend on, for comparisons."""
        return {
            "now": self.now,
            "cost": {kind: list(costs) for kind, costs in self._cost.items()},
            "pace": {kind: list(paces) for kind, paces in self._pace.items()},
            "seen": {kind: [list(row) for row in rows] for kind, rows in self._seen.items()},
        }
