"""Searches that compare trials at rungs, where the best go on and the others cost nothing more.

A trial that has come to a rung rests: its state is in the store, and no worker holds it. One that
goes on does so from there, with the bits of a trial that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.tune.search import Search, drawn, refuse_seeded, require_validation
from cerebro_hydra.tune.searchers.asynchronous_halving import AsynchronousHalving
from cerebro_hydra.tune.searchers.rungs import (
    Bracket,
    hyperband_brackets,
    rungs_from,
    shared_out,
)
from cerebro_hydra.tune.searchers.searcher import SearchedRun, Searcher
from cerebro_hydra.tune.searchers.space import check_space, whole
from cerebro_hydra.tune.searchers.successive_halving import SuccessiveHalving

AT_ONCE_PER_PARTITION = 2
"""How many trials of an `ASHASearch` train at once for each partition: with one, workers would wait
whenever two trials need the same partition next."""


class _RungSearch(Search):
    """Trains random draws of a search space to the first rung, and one of `eta` to the next."""

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        eta: int,
        grace_epochs: int,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.search_space = check_space(search_space)
        self.eta = whole("eta", eta, least=2)
        self.grace_epochs = whole("grace_epochs", grace_epochs, least=1)
        if self.num_epochs < self.grace_epochs:
            raise ConfigurationError(
                f"num_epochs is {self.num_epochs} and grace_epochs {self.grace_epochs}; the most "
                "that a trial trains is no less than the epochs before the first rung"
            )
        require_validation(self, type(self).__name__)


class SuccessiveHalvingSearch(_RungSearch):
    """Trains random draws, of which one in `eta` goes on from each rung; `Search` has the others.

    All draws train `grace_epochs`. Each rests then, until all others are there or have failed. The
    best of them, by `evaluation_metric` at this epoch, train `eta` times as long, and so on up to
    `num_epochs`; the others are stopped, and keep what they have reached. A rung lets one in `eta`
    of those go on that it compares, rounded down, and at least one. Of equal ones the better
    validation loss goes on, then the lower trial. With `order="seeded"` two runs have the same
    trials, decisions and bits.

    The algorithm is Jamieson and Talwalkar's (AISTATS 2016), as in Li et al., "A System for
    Massively Parallel Hyperparameter Tuning" (MLSys 2020), Algorithm 1.

    Args:
        search_space: `{name: hp_log(1e-4, 1e-1)}`, and `hp_choice` and its like.
        num_models: how many draws.
        eta: one in so many goes on from a rung.
        grace_epochs: epochs before the first rung.

    Raises:
        ConfigurationError: `eta` is below 2, `num_epochs` below `grace_epochs`, or `validation` is
            None; or as `Search`.
    """

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        num_models: int,
        eta: int = 3,
        grace_epochs: int = 1,
        **arguments: Any,
    ) -> None:
        super().__init__(search_space=search_space, eta=eta, grace_epochs=grace_epochs, **arguments)
        self.num_models = whole("num_models", num_models, least=1)

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher."""
        rungs = rungs_from(self.grace_epochs, self.num_epochs, self.eta)
        candidates = drawn(self, self.search_space, self.num_models)
        return SuccessiveHalving(candidates, [Bracket(self.num_models, rungs)], self.eta, run)


class HyperbandSearch(_RungSearch):
    """Trains brackets of successive halving, all at once; `Search` has the other arguments.

    How many epochs tell a good trial from a bad one is not known beforehand. So one bracket begins
    with many trials that are first compared after few epochs, one with few trials that all train
    `num_epochs`, and others lie between, each with about the same work. With num_epochs=81, eta=3:
    81 trials begin with 1 epoch, 34 with 3, 15 with 9, 8 with 27 and 5 with 81. Within a bracket
    trials go on as in `SuccessiveHalvingSearch`, and two seeded runs are alike.

    The algorithm is Li et al.'s, "Hyperband" (JMLR 18, 2018), Algorithm 1, with all brackets at
    once.

    Args:
        search_space: `{name: hp_log(1e-4, 1e-1)}`, and `hp_choice` and its like.
        num_models: how many trials all brackets have, which share them in these proportions; None
            takes the numbers of the algorithm.
        eta: one in so many goes on from a rung.
        grace_epochs: no trial is compared before so many.

    Raises:
        ConfigurationError: as `SuccessiveHalvingSearch`.
    """

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        num_models: int | None = None,
        eta: int = 3,
        grace_epochs: int = 1,
        **arguments: Any,
    ) -> None:
        super().__init__(search_space=search_space, eta=eta, grace_epochs=grace_epochs, **arguments)
        self.brackets = hyperband_brackets(self.grace_epochs, self.num_epochs, self.eta)
        if num_models is not None:
            self.brackets = shared_out(self.brackets, whole("num_models", num_models, least=1))
        self.num_models = sum(bracket.trials for bracket in self.brackets)

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher."""
        candidates = drawn(self, self.search_space, self.num_models)
        return SuccessiveHalving(candidates, self.brackets, self.eta, run)


class ASHASearch(_RungSearch):
    """Trains random draws, of which the best go on from a rung without waiting for the others.

    Two trials for each partition train at once. Whenever one comes to a rung it rests, and another
    takes its place: from the highest rung down, the best that rests there and is among the best
    one in `eta` of those that have come there; else a new draw. So no worker waits at a rung; but
    what is decided depends on which trial came first, and is repeated by no second run. The other
    arguments are those of `Search`.

    The algorithm is Li et al.'s, "A System for Massively Parallel Hyperparameter Tuning" (MLSys
    2020), Algorithm 2.

    Args:
        search_space: `{name: hp_log(1e-4, 1e-1)}`, and `hp_choice` and its like.
        num_models: how many draws.
        eta: one in so many may go on from a rung.
        grace_epochs: epochs before the first rung.

    Raises:
        ConfigurationError: `order` is "seeded"; or as `SuccessiveHalvingSearch`.
    """

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        num_models: int,
        eta: int = 4,
        grace_epochs: int = 1,
        **arguments: Any,
    ) -> None:
        super().__init__(search_space=search_space, eta=eta, grace_epochs=grace_epochs, **arguments)
        refuse_seeded(self, "ASHASearch lets trials go on")
        self.num_models = whole("num_models", num_models, least=1)

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher."""
        rungs = rungs_from(self.grace_epochs, self.num_epochs, self.eta)
        candidates = drawn(self, self.search_space, self.num_models)
        at_once = AT_ONCE_PER_PARTITION * run.partitions
        return AsynchronousHalving(candidates, rungs, self.eta, at_once, run)
