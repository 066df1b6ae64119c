"""Stops trials that do worse than the median of the others did by the same epoch.

The rule is that of Golovin et al., "Google Vizier" (KDD 2017), section 3.2.2: a trial is stopped if
its best value so far is worse than the median of the means that others had measured up to the same
epoch. It depends on who came there first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, isfinite, nan
from statistics import median
from typing import Any

from cerebro_hydra.plan.hop.ranking import EQUAL_WITHIN
from cerebro_hydra.tune.searchers.searcher import SearchDecision, SearchedRun, Stop
from cerebro_hydra.tune.searchers.space import whole


@dataclass(frozen=True)
class MedianStopping:
    """Stops a trial whose best value is worse than the median of the others' means by that epoch.

    Trials are compared with all that have ended the same epoch, also with those that train on.

    Args:
        grace_epochs: no trial is stopped before it has ended so many.
        min_trials: how many others must have ended an epoch before a trial is stopped there.

    Raises:
        ConfigurationError: an argument is not a whole number from 1.
    """

    grace_epochs: int = 1
    min_trials: int = 3

    def __post_init__(self) -> None:
        whole("grace_epochs", self.grace_epochs, least=1)
        whole("min_trials", self.min_trials, least=1)


class MedianStopped:
    """Is the searcher of a list of candidates, which stops those that do badly.

    Args:
        candidates: all are proposed at once.
        epochs: how many each of them trains that is not stopped.
        rule: who is stopped.
        run: says which metric is compared.
    """

    def __init__(
        self,
        candidates: Sequence[Mapping[str, Any]],
        epochs: int,
        rule: MedianStopping,
        run: SearchedRun,
    ) -> None:
        self.epochs = epochs
        self._candidates, self._proposed = candidates, 0
        self._rule, self._run = rule, run
        self._training: set[int] = set()
        self._values: list[list[float]] = []  # by trial, what each of its epochs has measured
        self._means: list[dict[int, float]] = [{} for _ in range(epochs)]
        """By epochs less one, the mean of each trial up to there."""

    @property
    def closed(self) -> bool:
        """Whether every candidate was proposed, and none can be stopped any more."""
        return self._proposed == len(self._candidates) and not self._training

    def ask(self) -> Mapping[str, Any] | None:
        """Return the next candidate."""
        if self._proposed == len(self._candidates):
            return None
        self._training.add(self._proposed)
        self._values.append([])
        self._proposed += 1
        return self._candidates[self._proposed - 1]

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> list[SearchDecision]:
        """Stop the trial if it does worse than the others did."""
        if metrics is None:
            self._training.discard(trial)
        if metrics is None or trial not in self._training:
            return []
        value = metrics.get(self._run.metric, nan)
        self._values[trial] += [value] if isfinite(value) else []
        values, means = self._values[trial], self._means[epochs - 1]
        others = list(means.values())
        if values:
            means[trial] = sum(values) / len(values)
        if epochs == self.epochs:
            self._training.remove(trial)
        elif epochs >= self._rule.grace_epochs and len(others) >= self._rule.min_trials:
            middle, sign = median(others), 1 if self._run.direction() == "min" else -1
            best = min((sign * value for value in values), default=None)
            if best is None or (
                best > sign * middle and not isclose(best, sign * middle, rel_tol=EQUAL_WITHIN)
            ):  # means are rounded
                self._training.remove(trial)
                return [Stop(trial, self._reason(epochs, middle, len(others)))]
        return []

    def _reason(self, epochs: int, middle: float, others: int) -> str:
        return (
            f"its best {self._run.metric} by epoch {epochs} is worse than {middle:.4g}, the median "
            f"of the means of {others} other trials by then"
        )
