"""A small searcher by rungs, as a user may write one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, isfinite
from random import Random
from typing import Any

from cerebro_hydra.tune.searchers.searcher import (
    Fork,
    Pause,
    SearchDecision,
    SearchedRun,
    Stop,
    TrainTo,
)

RUN = SearchedRun("train_loss", lambda: "min", 2)
"""What searchers know of a simulated run."""


class Rungs:
    """Pauses trials at each rung; then the better half goes on, and the others stop.

    The best trial of a rung is forked with a learning rate that is half as large.
    """

    epochs = 1

    def __init__(
        self, candidates: int = 6, most_epochs: int = 9, seed: int = 0, forks: bool = True
    ) -> None:
        self._random = Random(seed)
        self._left = candidates
        self._most_epochs = most_epochs
        self._forks = forks
        self._params: list[dict[str, Any]] = []
        self._rung = self.epochs
        self._awaited: set[int] = set()
        self._reached: dict[int, float] = {}

    @property
    def closed(self) -> bool:
        return not self._left and not self._awaited and not self._reached

    def ask(self) -> Mapping[str, Any] | None:
        if not self._left:
            return None
        self._left -= 1
        return self._propose({"lr": self._random.choice([0.3, 0.1, 0.01])})

    def _propose(self, params: dict[str, Any]) -> dict[str, Any]:
        self._awaited.add(len(self._params))
        self._params.append(params)
        return params

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> Iterable[SearchDecision]:
        self._awaited.discard(trial)
        if metrics is not None and epochs < self._rung:
            self._awaited.add(trial)
        elif metrics is not None:
            loss = metrics["train_loss"]
            self._reached[trial] = loss if isfinite(loss) else inf
            yield Pause(trial)
        if not self._left and not self._awaited:
            yield from self._climb()

    def _climb(self) -> Iterable[SearchDecision]:
        ranked = sorted(self._reached, key=lambda number: (self._reached[number], number))
        self._reached = {}
        half = ranked[: len(ranked) // 2]
        for number in ranked[len(half) :]:
            yield Stop(number, f"not in the better half after {self._rung} epochs")
        self._rung *= 2
        if not half or self._rung > self._most_epochs:
            for number in half:
                yield Stop(number, "it has climbed every rung")
            return
        best = half[0]
        self._awaited |= set(half)
        for number in half:
            yield TrainTo(number, self._rung)
        if self._forks:
            params = {"lr": self._params[best]["lr"] / 2}
            yield Fork(best, self._propose(params), self._rung)
