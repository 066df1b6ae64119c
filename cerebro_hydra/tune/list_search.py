"""List search: every candidate is given."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.tune.search import Search
from cerebro_hydra.tune.space import hp_choice
from cerebro_hydra.tune.trial import Trial


class ListSearch(Search):
    """Trains exactly the candidates given, in their order; the other arguments are `Search`'s.

    Args:
        candidates: the parameters of each trial, as JSON; some may be equal, or empty.
    """

    def __init__(self, *, candidates: Sequence[Mapping[str, Any]], **arguments: Any) -> None:
        # A space of one parameter, the number of the candidate.
        super().__init__(search_space={"candidate": hp_choice(range(len(candidates)))}, **arguments)
        self._candidates = [dict(candidate) for candidate in candidates]

    def candidates(self) -> list[dict[str, Any]]:
        """Return the candidates as they were given."""
        return self._candidates

    def trials_of(self, result: SearchResult) -> list[Trial]:
        """Return the trial of each candidate, also where a result lists refused ones last."""
        by_params: dict[str, deque[Trial]] = defaultdict(deque)
        for trial in result.trials:
            by_params[_key(trial.params)].append(trial)
        return [by_params[_key(candidate)].popleft() for candidate in self._candidates]


def _key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)
