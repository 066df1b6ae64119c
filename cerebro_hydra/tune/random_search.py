"""Random search: a number of draws from the search space."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.tune.candidate_list import CandidateList
from cerebro_hydra.tune.numbers import whole
from cerebro_hydra.tune.search import Search
from cerebro_hydra.tune.searcher import Searcher
from cerebro_hydra.tune.space import check_space, draws


class RandomSearch(Search):
    """Trains `num_models` random draws of the search space; the other arguments are `Search`'s.

    One generator, seeded by the search, makes every draw of every parameter: parameters are
    independent, and the same seed gives the same trials.

    Args:
        search_space: `{name: hp_uniform(0, 1)}`, or `hp_choice` and its like.
        num_models: how many draws.

    Raises:
        ConfigurationError: `num_models` is not a whole number from 1; or as `Search`.
    """

    def __init__(
        self, *, search_space: Mapping[str, Any], num_models: int, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.search_space = check_space(search_space)
        self.num_models = whole("num_models", num_models, least=1)

    def candidates(self) -> list[dict[str, Any]]:
        """Return the draws, in order."""
        random = Random(seed_of(self.seed, "random search"))
        return draws(self.search_space, self.num_models, random)

    def searcher(self) -> Searcher:
        """Return a new searcher, which proposes all draws."""
        return CandidateList(self.candidates(), self.num_epochs)
