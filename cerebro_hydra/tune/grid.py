"""Grid search: every combination of the search space is one trial."""

from __future__ import annotations

from typing import Any

from cerebro_hydra.tune.search import Search
from cerebro_hydra.tune.space import grid


class GridSearch(Search):
    """Trains every combination of the search space; the arguments are those of `Search`."""

    def candidates(self) -> list[dict[str, Any]]:
        """All combinations, in the order of the search space."""
        return grid(self.search_space)
