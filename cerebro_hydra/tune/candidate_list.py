"""Proposes candidates that are all known beforehand, and trains each to its last epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cerebro_hydra.tune.searcher import SearchDecision


class CandidateList:
    """Is the searcher of a grid, of random draws, and of every other list of candidates."""

    def __init__(self, candidates: Sequence[Mapping[str, Any]], epochs: int) -> None:
        self.epochs = epochs
        self._left = list(reversed(candidates))

    @property
    def closed(self) -> bool:
        """Whether every candidate was proposed."""
        return not self._left

    def ask(self) -> Mapping[str, Any] | None:
        """Return the next candidate."""
        return self._left.pop() if self._left else None

    def tell(
        self, trial: int, epochs: int, metrics: Mapping[str, float] | None
    ) -> Iterable[SearchDecision]:
        """Decide nothing: no trial depends on another."""
        return ()
