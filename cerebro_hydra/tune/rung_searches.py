"""Searches that compare trials at rungs, where the best go on and the others cost nothing more.

A trial that has come to a rung rests: its state is in the store, and no worker holds it. One that
goes on does so from there, with the bits of a trial that was never interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.tune.sampled_searches import require_optuna
from cerebro_hydra.tune.search import (
    AT_ONCE_PER_PARTITION,
    Search,
    drawn,
    refuse_seeded,
    require_as_begun,
    require_validation,
)
from cerebro_hydra.tune.searchers.asynchronous_halving import AsynchronousHalving
from cerebro_hydra.tune.searchers.population import Mutation, Population
from cerebro_hydra.tune.searchers.rungs import (
    Bracket,
    dealt,
    hyperband_brackets,
    rungs_from,
    shared_out,
)
from cerebro_hydra.tune.searchers.searcher import SearchedRun, Searcher
from cerebro_hydra.tune.searchers.space import check_space, share, whole
from cerebro_hydra.tune.searchers.successive_halving import SuccessiveHalving


class _RungSearch(Search):
    """Trains random draws of a search space to the first rung, and one of `eta` to the next."""

    num_models: int

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

    def first_candidates(self) -> Sequence[Mapping[str, Any]]:
        """Return the draws that are its candidates."""
        return drawn(self, self.search_space, self.num_models)

    def given(self, run: SearchedRun) -> dict[str, Any]:
        """Return what decides who is compared with whom, and when."""
        return {name: getattr(self, name) for name in ("num_models", "eta", "grace_epochs")}

    def _candidates(self, run: SearchedRun) -> Sequence[Mapping[str, Any]]:
        require_as_begun(run.given, self.given(run))
        return self.first_candidates()


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
        """Return a new searcher; raises as `require_as_begun` where it resumes another's run."""
        rungs = rungs_from(self.grace_epochs, self.num_epochs, self.eta)
        candidates = self._candidates(run)
        bracket = Bracket(self.num_models, rungs)
        return SuccessiveHalving(candidates, [bracket], dealt([bracket]), self.eta, run)


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
        """Return a new searcher; raises as `require_as_begun` where it resumes another's run."""
        candidates = self._candidates(run)
        return SuccessiveHalving(candidates, self.brackets, dealt(self.brackets), self.eta, run)


class BOHBSearch(HyperbandSearch):
    """Trains Hyperband's brackets of what a model draws; `Search` has the other arguments.

    The brackets of `HyperbandSearch` begin one after the other, the one with the most trials first,
    and each while the last trials of those before it train on. One in three candidates is drawn at
    random. The others are drawn by Optuna's tree-structured Parzen estimator, which is told of the
    highest rung that has enough results: three more than there are parameters. It draws where the
    better ones of that rung lie dense and the others do not. What it is told follows from the
    candidate's number. So with `order="seeded"` two runs have the same trials, decisions and bits,
    and one that is resumed decides as one that was never interrupted.

    The algorithm is Falkner, Klein and Hutter's, "BOHB" (ICML 2018), Algorithm 2.

    Args:
        search_space: `{name: hp_log(1e-4, 1e-1)}`, and `hp_choice` and its like.
        num_models: how many trials all brackets have, as in `HyperbandSearch`; None takes the
            numbers of Hyperband.
        eta: one in so many goes on from a rung.
        grace_epochs: no trial is compared before so many.

    Raises:
        SetupError: Optuna is not installed.
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
        require_optuna(type(self).__name__)
        super().__init__(
            search_space=search_space,
            num_models=num_models,
            eta=eta,
            grace_epochs=grace_epochs,
            **arguments,
        )

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher; raises as `require_as_begun` where it resumes another's run."""
        from cerebro_hydra.tune.searchers.modelled_brackets import ModelledBrackets
        from cerebro_hydra.tune.searchers.optuna_space import OptunaSpace

        require_as_begun(run.given, self.given(run))
        space = OptunaSpace(self.search_space)
        at_once = AT_ONCE_PER_PARTITION * run.partitions
        return ModelledBrackets(space, self.brackets, self.eta, at_once, self.seed, run)


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
        """Return a new searcher; raises as `require_as_begun` where it resumes another's run."""
        rungs = rungs_from(self.grace_epochs, self.num_epochs, self.eta)
        candidates = self._candidates(run)
        at_once = AT_ONCE_PER_PARTITION * run.partitions
        return AsynchronousHalving(candidates, rungs, self.eta, at_once, run)


class PBTSearch(Search):
    """Trains a population, whose worst give way to forks of the best; `Search` has the others.

    All members rest after each `perturbation_interval` epochs. Then each of the worst is stopped,
    and one of the best, drawn at random, goes on in its place as a fork: a new trial that takes
    over the state of its parent by reference, weights and the optimizer's state, and trains on with
    parameters that were drawn anew or moved. A number moves by 1.2 or 0.8, an option to one beside
    it. A replay follows the lineage. With `order="seeded"` two runs have the same trials, decisions
    and bits.

    The algorithm is Jaderberg et al.'s, "Population Based Training of Neural Networks" (2017).

    Args:
        search_space: `{name: hp_log(1e-4, 1e-1)}`, and `hp_choice` and its like.
        num_models: how many members train at the same time; forks take the places of others.
        mutations: the names of those parameters that change in a fork. They must leave the model
            and the optimizer's kind as they are, as learning rate, weight decay, momentum, batch
            size and dropout do; a fork that is of another structure is refused and fails alone.
        perturbation_interval: epochs between two comparisons.
        quantile_fraction: the share of members that give way, and of those that are forked.
        resample_probability: how likely a parameter that changes is drawn anew.

    Raises:
        ConfigurationError: `mutations` names what the space does not have, no comparison comes
            before `num_epochs`, or `validation` is None; or as `Search`.
    """

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        num_models: int,
        mutations: Sequence[str],
        perturbation_interval: int = 1,
        quantile_fraction: float = 0.25,
        resample_probability: float = 0.25,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.search_space = check_space(search_space)
        self.num_models = whole("num_models", num_models, least=2)
        if isinstance(mutations, str) or not isinstance(mutations, Sequence) or not mutations:
            raise ConfigurationError(
                f"mutations is {mutations!r}; give a list of names of search_space, such as "
                f"{list(self.search_space)[:1]!r}"
            )
        for name in mutations:
            if name not in self.search_space:
                raise ConfigurationError(
                    f"mutations has {name!r}, and search_space has no such parameter; it has "
                    f"{list(self.search_space)}"
                )
        self.mutations = tuple(mutations)
        self.perturbation_interval = whole("perturbation_interval", perturbation_interval, least=1)
        if self.perturbation_interval >= self.num_epochs:
            raise ConfigurationError(
                f"perturbation_interval is {perturbation_interval} and num_epochs "
                f"{self.num_epochs}, so that no trial would be compared; give more epochs"
            )
        self.quantile_fraction = share("quantile_fraction", quantile_fraction)
        if not 0 < self.quantile_fraction <= 0.5:
            raise ConfigurationError(
                f"quantile_fraction is {quantile_fraction!r}; it is above 0 and at most 0.5"
            )
        self.resample_probability = share("resample_probability", resample_probability)
        require_validation(self, type(self).__name__)

    def first_candidates(self) -> Sequence[Mapping[str, Any]]:
        """Return the draws that are its candidates."""
        return drawn(self, self.search_space, self.num_models)

    def given(self, run: SearchedRun) -> dict[str, Any]:
        """Return what decides who gives way to whom, and when."""
        names = "num_models", "perturbation_interval", "quantile_fraction", "resample_probability"
        return {name: getattr(self, name) for name in names}

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher; raises as `require_as_begun` where it resumes another's run."""
        require_as_begun(run.given, self.given(run))
        interval = self.perturbation_interval
        rungs = (*range(interval, self.num_epochs, interval), self.num_epochs)
        space = {name: self.search_space[name] for name in self.mutations}
        return Population(
            self.first_candidates(),
            rungs,
            self.quantile_fraction,
            Mutation(space, self.resample_probability),
            Random(seed_of(self.seed, "population")),
            run,
        )
