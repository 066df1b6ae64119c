"""Grid search: every combination of the search space is one trial."""

from __future__ import annotations

from typing import Any

from cerebro_hydra.tune.search import Search
from cerebro_hydra.tune.space import grid


class GridSearch(Search):
    """Trains every combination of the search space; the arguments are those of `Search`.

    Raises:
        ConfigurationError: a parameter has infinitely many values; or as `Search`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._candidates = grid(self.search_space)

    def candidates(self) -> list[dict[str, Any]]:
        """Return all combinations, in the order of the search space."""
        return self._candidates
