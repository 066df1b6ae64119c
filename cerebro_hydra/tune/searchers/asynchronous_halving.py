"""Trains candidates by asynchronous successive halving (ASHA), which waits for nobody at a rung.

A trial rests at its rung. Whenever fewer trials train than may at once, the highest rung that has
one promotes the best of its best part that has not gone on yet, else a new candidate begins. So
what is decided depends on who came first; a run that is resumed is told in the same order.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from functools import cmp_to_key
from typing import Any

from cerebro_hydra.plan.hop.ranking import Measured, is_better
from cerebro_hydra.tune.searchers.searcher import (
    Pause,
    SearchDecision,
    SearchedRun,
    Stop,
    TrainTo,
)


class AsynchronousHalving:
    """Is the searcher of `ASHASearch`.

    If no trial is left to train or to promote, and none has reached the last rung, because too few
    have come to some rung, the best one that rests highest goes on.

    Args:
        candidates: proposed in this order, while fewer than `at_once` trials train.
        rungs: the epochs after which trials are compared, ascending; the last one is their end.
        eta: a rung may promote one of so many that have come there.
        at_once: how many trials train at the same time.
        run: says which metric is compared.
    """

    def __init__(
        self,
        candidates: Sequence[Mapping[str, Any]],
        rungs: Sequence[int],
        eta: int,
        at_once: int,
        run: SearchedRun,
    ) -> None:
        self._candidates, self._proposed = candidates, 0
        self._last, self._eta, self._at_once = rungs[-1], eta, at_once
        self._rungs = [_Rung(epochs, run) for epochs in rungs[:-1]]
        self._training: dict[int, int] = {}  # the rung that each trial trains to, by number
        self._complete: set[int] = set()
        self.epochs = rungs[0]

    @property
    def closed(self) -> bool:
        """Whether every candidate was proposed, and nobody trains or can go on."""
        return self._proposed == len(self._candidates) and not self._training

    def ask(self) -> Mapping[str, Any] | None:
        """Return the next candidate, if fewer trials train than may."""
        if self._proposed == len(self._candidates) or len(self._training) >= self._at_once:
            return None
        trial, self._proposed = self._proposed, self._proposed + 1
        self._training[trial] = 0
        return self._candidates[trial]

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> list[SearchDecision]:
        """Let a trial rest that has come to a rung, and promote whoever may go on."""
        decided = list[SearchDecision]()
        if metrics is None:
            self._training.pop(trial, None)
            self._complete.discard(trial)
            for each in self._rungs:
                each.remove(trial)
        elif epochs == self._last and self._training.pop(trial, None) is not None:
            self._complete.add(trial)
            decided.append(Pause(trial))
        elif (rung := self._rung_of(trial)) is not None and epochs == rung.epochs:
            del self._training[trial]
            rung.add(trial, metrics)
            decided.append(Pause(trial, epochs))
        while len(self._training) < self._at_once and (step := self._promotable()) is not None:
            level, promoted = step
            decided.append(self._promote(level, promoted))
        if self.closed:
            decided += self._end()
        return decided

    def _rung_of(self, trial: int) -> _Rung | None:
        """Return the rung that a trial trains to; None if it trains to the end, or not at all."""
        level = self._training.get(trial, len(self._rungs))
        return self._rungs[level] if level < len(self._rungs) else None

    def _promotable(self) -> tuple[int, int] | None:
        """Return the level and the trial of the next promotion; None if there is none now."""
        levels = range(len(self._rungs) - 1, -1, -1)
        for level in levels:
            rung = self._rungs[level]
            if (best := rung.promotable(rung.reported // self._eta)) is not None:
                return level, best
        if self._training or self._complete or self._proposed < len(self._candidates):
            return None
        for level in levels:
            if (best := self._rungs[level].promotable()) is not None:
                return level, best
        return None

    def _promote(self, level: int, trial: int) -> TrainTo:
        self._rungs[level].promoted.add(trial)
        self._training[trial] = level + 1
        next_rungs = [rung.epochs for rung in self._rungs[level + 1 :]]
        return TrainTo(trial, (*next_rungs, self._last)[0])

    def _end(self) -> list[SearchDecision]:
        """Stop those that rest: a search that is closed has their trials finish, else."""
        return [
            Stop(
                trial,
                f"not among the best {max(1, rung.reported // self._eta)} of {rung.reported} "
                f"trials after epoch {rung.epochs}",
            )
            for rung in self._rungs
            for trial in rung.resting
        ]


class _Rung:
    """Holds who has come to a rung and is not over, best first, and who went on from there."""

    def __init__(self, epochs: int, run: SearchedRun) -> None:
        self.epochs, self._run = epochs, run
        self.promoted: set[int] = set()
        self._best_first: list[Measured] = []
        self._no_numbers: set[int] = set()

    @property
    def reported(self) -> int:
        """Return how many have come, and are not over."""
        return len(self._best_first) + len(self._no_numbers)

    @property
    def resting(self) -> list[int]:
        """Return who rests here, by number."""
        there = {each.trial for each in self._best_first} | self._no_numbers
        return sorted(there - self.promoted)

    def add(self, trial: int, metrics: Mapping[str, float]) -> None:
        """Take in what a trial has measured here."""
        measured = Measured.of(metrics, self._run.metric, self.epochs, trial)
        if measured is None:
            self._no_numbers.add(trial)
        else:
            insort(self._best_first, measured, key=cmp_to_key(self._compare))

    def _compare(self, one: Measured, other: Measured) -> int:
        direction = self._run.direction()
        return is_better(other, one, direction) - is_better(one, other, direction)

    def remove(self, trial: int) -> None:
        """Forget a trial that is over."""
        self._best_first = [each for each in self._best_first if each.trial != trial]
        self._no_numbers.discard(trial)

    def promotable(self, among: int | None = None) -> int | None:
        """Return the best trial that rests here among the best so many; None takes all."""
        for each in self._best_first[:among]:
            if each.trial not in self.promoted:
                return each.trial
        return None
