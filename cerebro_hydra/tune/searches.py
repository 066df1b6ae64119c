"""Searches: over a grid, at random, of given candidates, and by a searcher of the user's own.

Those that stop early by rungs are in `tune/rung_searches.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from cerebro_hydra.data.batches import num_windows
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.storage.run_document import steps_of_epoch
from cerebro_hydra.tune.search import (
    Search,
    drawn,
    refuse_seeded,
    require_as_begun,
    require_validation,
)
from cerebro_hydra.tune.searchers.median_stopping import MedianStopped, MedianStopping
from cerebro_hydra.tune.searchers.searcher import CandidateList, SearchedRun, Searcher
from cerebro_hydra.tune.searchers.shared_prefixes import SharedPrefixes
from cerebro_hydra.tune.searchers.space import check_space, grid, whole
from cerebro_hydra.waits import Waiting


class _DrawnSearch(Search):
    """Trains candidates that are all known beforehand.

    Either a rule stops some of them early, or they share the epochs in which they train alike.
    """

    def __init__(
        self, *, stopping: MedianStopping | None, share_prefixes: bool, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        if not isinstance(share_prefixes, bool):
            raise ConfigurationError(f"share_prefixes is {share_prefixes!r}; it is True or False")
        if share_prefixes and stopping is not None:
            raise ConfigurationError(
                f"share_prefixes is True and stopping is {stopping!r}, which would stop trials "
                "that others are to go on from; give one of them"
            )
        self.share_prefixes = share_prefixes
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

    def first_candidates(self) -> Sequence[Mapping[str, Any]]:
        """Return all candidates."""
        return self.candidates()

    def given(self, run: SearchedRun) -> dict[str, Any]:
        """Return which candidates train alike in which epochs, if they are to share these."""
        if not self.share_prefixes:
            return {}
        kinds = self._kinds_of_epochs(run)
        return {"share_prefixes": kinds, "candidates": len(kinds), "num_epochs": self.num_epochs}

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher, which proposes all candidates.

        Raises:
            ConfigurationError: it resumes a run that was begun with another `share_prefixes`, or
                shares prefixes with other candidates or epochs.
        """
        candidates = self.candidates()
        if (begun := "share_prefixes" in run.given) != self.share_prefixes:
            raise ConfigurationError(
                f"share_prefixes is {self.share_prefixes}, and the run was begun with {begun}; "
                "give that again, or begin a new run"
            )
        if begun:
            now = {"candidates": len(candidates), "num_epochs": self.num_epochs}
            require_as_begun(run.given, now)
            return SharedPrefixes(candidates, run.given["share_prefixes"])
        if self.stopping is None:
            return CandidateList(candidates, self.num_epochs)
        return MedianStopped(candidates, self.num_epochs, self.stopping, run)

    def _kinds_of_epochs(self, run: SearchedRun) -> list[list[int]]:
        """Return what `SharedPrefixes` is given; each candidate's model is built for it."""
        from cerebro_hydra.tune.trials import TimedCall

        known: dict[Hashable, int] = {}
        new, kinds = count(), []
        candidates = self.candidates()
        with Waiting(self._surroundings.report) as waiting:
            for number, params in enumerate(candidates):
                waiting.now(f"comparing the schedule of model {number + 1} of {len(candidates)}")
                call = TimedCall(partial(self._epochs_of, params, run.rows))
                try:
                    found = call.result(self.admission_seconds)
                except Exception:  # its admission says why, and fails it alone
                    found = None
                if found is None:
                    kinds.append([next(new) for _ in range(self.num_epochs)])
                else:
                    kinds.append([known.setdefault(e, next(new)) for e in found])
        shared, whole_search = SharedPrefixes(candidates, kinds), self.num_epochs * len(candidates)
        self._surroundings.report(
            f"share_prefixes: {shared.shared_epochs} of {whole_search} epochs are trained once for "
            "several trials, because their schedules agree"
        )
        return kinds

    def _epochs_of(self, params: Mapping[str, Any], rows: Sequence[int]) -> list[Hashable] | None:
        """Return for each epoch what is equal where another candidate trains alike, if known."""
        from cerebro_hydra.recipe import Columns
        from cerebro_hydra.recipe.build import build_keeping_random_state
        from cerebro_hydra.shards.admission.admit import training_key
        from cerebro_hydra.shards.admission.effects.isolated_factory import IsolatedFactory
        from cerebro_hydra.tune.admission import refusing

        columns = Columns.of(self.data_spec)
        with refusing(), IsolatedFactory(self.estimator_gen_fn) as factory:
            recipe = build_keeping_random_state(factory, params, self.seed, columns)
            key = training_key(recipe)
            windows = [num_windows(each, recipe.batch_size, recipe.accumulate) for each in rows]
            steps = steps_of_epoch(windows, recipe.replicas)
            options = recipe.lr_schedule.of_epochs(recipe.optimizer, steps, self.num_epochs)
        return None if key is None or options is None else [(key, each) for each in options]


class GridSearch(_DrawnSearch):
    """Trains every combination of the search space; the other arguments are those of `Search`.

    Args:
        search_space: `{name: hp_choice([...])}`, in the order in which trials are numbered.
        stopping: `MedianStopping()` ends trials early that do worse than others did; None lets
            every trial train `num_epochs`.
        share_prefixes: whether trials that differ in their LR schedule alone are one trial for as
            long as these agree; the others are forked from it at the first epoch that differs. In
            the epochs that they share they have the seed of that one trial, and so its order of
            rows and its dropout. Each model is built once more before the run begins.

    Raises:
        ConfigurationError: a parameter has infinitely many values; or there is a rule that stops
            and `validation` is None, `order` is "seeded" or `share_prefixes` is True; or as
            `Search`.
    """

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        stopping: MedianStopping | None = None,
        share_prefixes: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(stopping=stopping, share_prefixes=share_prefixes, **arguments)
        self.search_space = check_space(search_space)
        self._candidates = grid(self.search_space)

    def candidates(self) -> list[dict[str, Any]]:
        """Return all combinations, in the order of the search space."""
        return self._candidates


class RandomSearch(_DrawnSearch):
    """Trains `num_models` random draws of the search space; the other arguments are `Search`'s.

    One generator, seeded by the search, makes every draw of every parameter: parameters are
    independent, and the same seed gives the same trials.

    Args:
        search_space: `{name: hp_uniform(0, 1)}`, or `hp_choice` and its like.
        num_models: how many draws.
        stopping: as of `GridSearch`.
        share_prefixes: as of `GridSearch`.

    Raises:
        ConfigurationError: `num_models` is not a whole number from 1; or as `GridSearch`.
    """

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        num_models: int,
        stopping: MedianStopping | None = None,
        share_prefixes: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(stopping=stopping, share_prefixes=share_prefixes, **arguments)
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
