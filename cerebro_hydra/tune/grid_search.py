"""Grid search: every combination of the search space is one trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro_hydra.tune.candidate_list import CandidateList
from cerebro_hydra.tune.search import Search
from cerebro_hydra.tune.searcher import Searcher
from cerebro_hydra.tune.space import check_space, grid


class GridSearch(Search):
    """Trains every combination of the search space; the other arguments are those of `Search`.

    Args:
        search_space: `{name: hp_choice([...])}`, in the order in which trials are numbered.

    Raises:
        ConfigurationError: a parameter has infinitely many values; or as `Search`.
    """

    def __init__(self, *, search_space: Mapping[str, Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.search_space = check_space(search_space)
        self._candidates = grid(self.search_space)

    def candidates(self) -> list[dict[str, Any]]:
        """Return all combinations, in the order of the search space."""
        return self._candidates

    def searcher(self) -> Searcher:
        """Return a new searcher, which proposes all combinations."""
        return CandidateList(self.candidates(), self.num_epochs)
