"""List search: every candidate is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cerebro_hydra.tune.candidate_list import CandidateList
from cerebro_hydra.tune.search import Search
from cerebro_hydra.tune.searcher import Searcher


class ListSearch(Search):
    """Trains exactly the candidates given, in their order; the other arguments are `Search`'s.

    Args:
        candidates: the parameters of each trial, as JSON; some may be equal, or empty.
    """

    def __init__(self, *, candidates: Sequence[Mapping[str, Any]], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._candidates = [dict(candidate) for candidate in candidates]

    def searcher(self) -> Searcher:
        """Return a new searcher, which proposes the candidates as they were given."""
        return CandidateList(self._candidates, self.num_epochs)
