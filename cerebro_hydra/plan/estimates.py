"""How long tasks take, learnt from the seconds in events; the only notion of time in here."""

from __future__ import annotations

from collections.abc import Sequence

from cerebro_hydra.plan.visits import Kind


class Estimates:
    """Seconds per (kind, trial, partition), and a clock that is as late as the events say.

    A duration is modelled as cost(trial) x pace(partition) until that very pair was seen. The
    prior is the trial's relative cost at pace 1, and an evaluation is taken as a third of a
    sub-epoch, as it is for a forward pass.
    """

    def __init__(self, costs: Sequence[float], partitions: int) -> None:
        self.now = 0.0
        self._cost: dict[Kind, list[float]] = {
            "train": list(costs),
            "evaluate": [cost / 3 for cost in costs],
        }
        self._pace: dict[Kind, list[float]] = {
            "train": [1.0] * partitions,
            "evaluate": [1.0] * partitions,
        }
        self._seen: dict[tuple[Kind, int, int], float] = {}

    def seconds(self, kind: Kind, trial: int, partition: int) -> float:
        """Expected duration of a task."""
        seen = self._seen.get((kind, trial, partition))
        return self._cost[kind][trial] * self._pace[kind][partition] if seen is None else seen

    def learn(self, kind: Kind, trial: int, partition: int, seconds: float) -> None:
        """Take in a measured duration."""
        if not seconds > 0:
            return
        costs, paces = self._cost[kind], self._pace[kind]
        error = seconds / (costs[trial] * paces[partition])
        if not self._seen:  # the unit of the costs becomes seconds
            for known in self._cost.values():
                known[:] = [cost * error for cost in known]
        else:  # both are to blame in equal parts
            costs[trial] *= error**0.5
            paces[partition] *= error**0.5
        self._seen[kind, trial, partition] = seconds

    def reach(self, moment: float) -> None:
        """Something was seen to end at this moment."""
        self.now = max(self.now, moment)

    def comparable(self) -> dict[str, object]:
        """All that is known, for comparisons."""
        return {
            "now": self.now,
            "cost": {kind: list(costs) for kind, costs in self._cost.items()},
            "pace": {kind: list(paces) for kind, paces in self._pace.items()},
            "seen": sorted(self._seen.items()),
        }
