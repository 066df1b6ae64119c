"""Trains brackets of candidates by successive halving: a rung decides when all who come are there.

Each trial rests at its rung until the others of its bracket have come or are over. So what is
decided depends on what was measured, and not on who came first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cerebro_hydra.plan.hop.ranking import Measured, ranked
from cerebro_hydra.tune.searchers.rungs import Bracket
from cerebro_hydra.tune.searchers.searcher import (
    Pause,
    SearchDecision,
    SearchedRun,
    Stop,
    TrainTo,
)


class SuccessiveHalving:
    """Is the searcher of one bracket, or of several that train at once, as in Hyperband.

    Args:
        candidates: as many as all brackets have trials; who lets the list grow may ask again.
        brackets: how many trials begin together, and after which epochs they are compared.
        bracket_of: the bracket of each candidate.
        eta: one of so many goes on from a rung, and at least the best one.
        run: says which metric is compared.
    """

    def __init__(
        self,
        candidates: Sequence[Mapping[str, Any]],
        brackets: Sequence[Bracket],
        bracket_of: Sequence[int],
        eta: int,
        run: SearchedRun,
    ) -> None:
        self._climbs = [_Climb(bracket, eta, run) for bracket in brackets]
        self._climb_of = [self._climbs[index] for index in bracket_of]
        self._candidates, self._proposed = candidates, 0
        self.epochs = self._climb_of[0].epochs

    @property
    def closed(self) -> bool:
        """Whether every bracket has sent its last trials to their last epoch."""
        return all(climb.closed for climb in self._climbs)

    def ask(self) -> Mapping[str, Any] | None:
        """Return the next candidate, of whichever bracket it is; None if the list has no more."""
        if self._proposed == len(self._candidates):
            return None
        trial, self._proposed = self._proposed, self._proposed + 1
        self._climb_of[trial].begin(trial)
        self.epochs = self._climb_of[trial].epochs
        return self._candidates[trial]

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> list[SearchDecision]:
        """Let a trial rest at its rung; let the best go on once all of its bracket are there."""
        return self._climb_of[trial].tell(trial, epochs, metrics)

    def decided(self, bracket: int, level: int) -> bool:
        """Return whether a rung of a bracket has let trials go on, or nobody will come there."""
        climb = self._climbs[bracket]
        return climb.closed or climb.level > level


class _Climb:
    """Follows one bracket: who trains towards its present rung, and who rests there."""

    def __init__(self, bracket: Bracket, eta: int, run: SearchedRun) -> None:
        self._rungs, self._eta, self._run = bracket.rungs, eta, run
        self._to_begin = bracket.trials
        self.level = 0
        self._training: set[int] = set()
        self._resting: dict[int, Measured | None] = {}  # None where the metric was no number

    @property
    def epochs(self) -> int:
        """Return the first rung."""
        return self._rungs[0]

    @property
    def closed(self) -> bool:
        """Return whether nothing is left to be compared."""
        return not self._to_begin and (self._at_last_rung or not self._training)

    @property
    def _at_last_rung(self) -> bool:
        return self.level == len(self._rungs) - 1

    def begin(self, trial: int) -> None:
        """Take in a trial, which trains to the first rung."""
        self._to_begin -= 1
        self._training.add(trial)

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> list[SearchDecision]:
        rung, decided = self._rungs[self.level], list[SearchDecision]()
        if metrics is None:
            self._training.discard(trial)
            self._resting.pop(trial, None)
        elif trial in self._training and epochs == rung and not self._at_last_rung:
            self._training.remove(trial)
            self._resting[trial] = Measured.of(metrics, self._run.metric, epochs, trial)
            decided.append(Pause(trial, rung))
        if not (self._to_begin or self._training or self._at_last_rung):
            decided += self._compared(rung)
        return decided

    def _compared(self, rung: int) -> list[SearchDecision]:
        """Send the best of those that rest to the next rung, and stop the others."""
        numbers = [each for _, each in sorted(self._resting.items()) if each is not None]
        kept = max(1, len(self._resting) // self._eta)
        best = ranked(numbers, self._run.direction())[:kept] if numbers else []
        promoted = [each.trial for each in best]
        stopped = sorted(self._resting.keys() - promoted)
        reason = f"not among the best {kept} of {len(self._resting)} trials after epoch {rung}"
        self.level += 1
        self._training, self._resting = set(promoted), {}
        next_rung = self._rungs[self.level]
        return [
            *(TrainTo(trial, next_rung) for trial in promoted),
            *(Stop(trial, reason) for trial in stopped),
        ]
