"""Searches: over a grid, at random, of given candidates, and by a searcher of the user's own.

Those that stop early by rungs are in `tune/rung_searches.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.tune.search import Search, drawn, refuse_seeded, require_validation
from cerebro_hydra.tune.searchers.median_stopping import MedianStopped, MedianStopping
from cerebro_hydra.tune.searchers.searcher import CandidateList, SearchedRun, Searcher
from cerebro_hydra.tune.searchers.space import check_space, grid, whole


class _StoppingSearch(Search):
    """Trains a list of candidates, and stops those early that its rule says."""

    def __init__(self, *, stopping: MedianStopping | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        if stopping is not None and not isinstance(stopping, MedianStopping):
            raise ConfigurationError(
                f"stopping is {stopping!r}; give a MedianStopping(), or None to stop no trial"
            )
        self.stopping = stopping
        if stopping is not None:
            require_validation(self, "stopping")
            refuse_seeded(self, "stopping=MedianStopping() stops trials")

    @abstractmethod
    def candidates(self) -> list[dict[str, Any]]:
        """Return all candidates, in the order in which trials are numbered."""

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher, which proposes all candidates."""
        if self.stopping is None:
            return CandidateList(self.candidates(), self.num_epochs)
        return MedianStopped(self.candidates(), self.num_epochs, self.stopping, run)


class GridSearch(_StoppingSearch):
    """Trains every combination of the search space; the other arguments are those of `Search`.

    Args:
        search_space: `{name: hp_choice([...])}`, in the order in which trials are numbered.
        stopping: `MedianStopping()` ends trials early that do worse than others did; None lets
            every trial train `num_epochs`.

    Raises:
        ConfigurationError: a parameter has infinitely many values; or there is a rule that stops
            and `validation` is None or `order` is "seeded"; or as `Search`.
    """

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        stopping: MedianStopping | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(stopping=stopping, **arguments)
        self.search_space = check_space(search_space)
        self._candidates = grid(self.search_space)

    def candidates(self) -> list[dict[str, Any]]:
        """Return all combinations, in the order of the search space."""
        return self._candidates


class RandomSearch(_StoppingSearch):
    """Trains `num_models` random draws of the search space; the other arguments are `Search`'s.

    One generator, seeded by the search, makes every draw of every parameter: parameters are
    independent, and the same seed gives the same trials.

    Args:
        search_space: `{name: hp_uniform(0, 1)}`, or `hp_choice` and its like.
        num_models: how many draws.
        stopping: as of `GridSearch`.

    Raises:
        ConfigurationError: `num_models` is not a whole number from 1; or as `GridSearch`.
    """

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        num_models: int,
        stopping: MedianStopping | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(stopping=stopping, **arguments)
        self.search_space = check_space(search_space)
        self.num_models = whole("num_models", num_models, least=1)

    def candidates(self) -> list[dict[str, Any]]:
        """Return the draws, in order."""
        return drawn(self, self.search_space, self.num_models)


class ListSearch(Search):
    """Trains exactly the candidates given, in their order; the other arguments are `Search`'s.

    Args:
        candidates: the parameters of each trial, as JSON; some may be equal, or empty.
    """

    def __init__(self, *, candidates: Sequence[Mapping[str, Any]], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._candidates = [dict(candidate) for candidate in candidates]

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher, which proposes the candidates as they were given."""
        return CandidateList(self._candidates, self.num_epochs)


class CustomSearch(Search):
    """Trains what your own searcher proposes, as far as it decides; `Search` has other arguments.

    ```python
    class Halving:
        epochs = 1  # a candidate trains one epoch; then `tell` lets it go on, pauses or stops it

        ...  # closed, ask and tell, as `cerebro_hydra.tune.Searcher` describes them

    CustomSearch(make_searcher=lambda: Halving(candidates=27), num_epochs=9, backend=...).fit(df)
    ```

    Args:
        make_searcher: a function without arguments that returns a new `Searcher`. It is called for
            each fit, and its searchers must decide alike when they are told alike.

    Raises:
        ConfigurationError: `make_searcher` is no function; or as `Search`.
    """

    def __init__(self, *, make_searcher: Callable[[], Searcher], **arguments: Any) -> None:
        super().__init__(**arguments)
        if not callable(make_searcher):
            raise ConfigurationError(
                f"make_searcher is {make_searcher!r}; give a function that returns a new searcher"
            )
        self._make_searcher = make_searcher

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher."""
        return self._make_searcher()
