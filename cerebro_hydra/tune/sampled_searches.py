"""Searches whose candidates a sampler of Optuna draws, which learns from the trials before.

Optuna is loaded when a search is made; `pip install "cerebro-hydra[optuna]"` brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from cerebro_hydra.errors import ConfigurationError, SetupError, StoreError
from cerebro_hydra.foreign_text import named_error_text
from cerebro_hydra.observe.records import ENDS
from cerebro_hydra.storage import RunFolder
from cerebro_hydra.tune.search import AT_ONCE_PER_PARTITION, Search, drawn, require_as_begun
from cerebro_hydra.tune.searchers.searcher import SearchedRun, Searcher
from cerebro_hydra.tune.searchers.space import check_space, whole
from cerebro_hydra.tune.trial import Trial

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler

    from cerebro_hydra.tune.result import SearchResult

_MARK = "cerebro_hydra"
"""The attribute of a study's trial that says which trial of which run it is."""

DRAWS_LOOKED_AT = 3
"""How many draws of a space are built before rows are prepared, until one can be."""


class OptunaSearch(Search):
    """Trains what a sampler of Optuna draws; `Search` has the other arguments.

    Two trials for each partition train at once. The sampler is told of them in the order of their
    numbers: when it draws trial n, it knows the end of every trial that comes at least so many
    before it, and that the others train. So with `order="seeded"` two runs have the same trials and
    bits, and a run that is resumed has those of one that was never interrupted: the sampler is told
    again what the journal has. The sampler is copied, and draws by the search's `seed`.

    Every trial trains `num_epochs`, or until its early stopping. A sampler that has nothing left to
    draw, as one of a grid, ends the search before `num_models`.

    ```python
    OptunaSearch(
        sampler=optuna.samplers.TPESampler(multivariate=True),
        search_space={"lr": hp_log(1e-4, 1e-1), "momentum": hp_uniform(0, 0.99)},
        num_models=40,
        num_epochs=5,
        ...,
    ).fit(df)
    ```

    Args:
        search_space: `{name: hp_log(1e-4, 1e-1)}`, and `hp_choice` and its like.
        num_models: how many trials at most.
        sampler: of Optuna, or of your own, an `optuna.samplers.BaseSampler`; None takes that of the
            study.
        study: the sampler knows its trials that have ended from the start, and those that wait are
            drawn first. It is copied when the run begins, and the run's folder keeps what was
            there. When the run is over, all its trials are added at once, and none that is there
            already. None begins with nothing.

    Raises:
        SetupError: Optuna is not installed.
        ConfigurationError: there is neither a sampler nor a study, the study is of another space or
            has several objectives; or as `Search`.
    """

    def __init__(
        self,
        *,
        search_space: Mapping[str, Any],
        num_models: int,
        sampler: BaseSampler | None = None,
        study: optuna.Study | None = None,
        **arguments: Any,
    ) -> None:
        optuna = require_optuna(type(self).__name__)
        super().__init__(**arguments)
        self.search_space = check_space(search_space)
        self.num_models = whole("num_models", num_models, least=1)
        if study is not None and not isinstance(study, optuna.Study):
            raise ConfigurationError(f"study is {study!r}; give a study of Optuna, or None")
        if study is not None and len(study.directions) > 1:
            raise ConfigurationError(
                f"the study {study.study_name!r} has {len(study.directions)} objectives, and a "
                "search has one, evaluation_metric; give a study with one direction"
            )
        if sampler is None and study is None:
            raise ConfigurationError(
                "sampler and study are None; give a sampler such as "
                "optuna.samplers.TPESampler(), a study, or both"
            )
        if sampler is not None and not isinstance(sampler, optuna.samplers.BaseSampler):
            raise ConfigurationError(
                f"sampler is {sampler!r}; give one of optuna.samplers, such as TPESampler()"
            )
        self.sampler, self.study = sampler, study

    def first_candidates(self) -> Sequence[Mapping[str, Any]]:
        """Return some draws of the space; which are proposed is the sampler's choice."""
        return drawn(self, self.search_space, DRAWS_LOOKED_AT)

    def given(self, run: SearchedRun) -> dict[str, Any]:
        """Return how many trials there are at most, and the study's."""
        from cerebro_hydra.tune.searchers.studies import study_to_json

        study = None if self.study is None else study_to_json(self.study)
        return {"num_models": self.num_models, "study": study}

    def searcher(self, run: SearchedRun) -> Searcher:
        """Return a new searcher, which knows of the study what it had when the run began.

        Raises:
            ConfigurationError: the run was begun with another study, or another number of trials.
        """
        from cerebro_hydra.tune.searchers.optuna_space import OptunaSpace
        from cerebro_hydra.tune.searchers.sampled import SampledCandidates
        from cerebro_hydra.tune.searchers.studies import check_known, study_of_run

        known = self._known(run.given)
        space = OptunaSpace(self.search_space)
        check_known(known, space)
        sampler = self.sampler
        if sampler is None:
            assert self.study is not None
            sampler = self.study.sampler
        return SampledCandidates(
            space,
            study_of_run(sampler, self.seed, known["trials"]),
            self.num_models,
            self.num_epochs,
            AT_ONCE_PER_PARTITION * run.partitions,
            run,
            self._keeps_best(run),
        )

    def _keeps_best(self, run: SearchedRun) -> bool:
        return self.keep == "best" or (self.keep is None and run.metric.startswith("val_"))

    def _known(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the study with which the run was begun, as JSON."""
        require_as_begun(given, {"num_models": self.num_models})
        mine = None if self.study is None else self.study.study_name
        begun = None if given["study"] is None else given["study"]["name"]
        if mine != begun:
            raise ConfigurationError(
                f"the study is {mine!r}, and the run was begun with {begun!r}; give it again"
            )
        return given["study"] or {"name": None, "trials": []}

    def check_direction(self, direction: str) -> None:
        """Refuse a metric that the study would have the other way round.

        Raises:
            ConfigurationError: it is.
        """
        if self.study is not None and not self.study.direction.name.lower().startswith(direction):
            better = {"min": "smaller", "max": "larger"}[direction]
            raise ConfigurationError(
                f"the study {self.study.study_name!r} is to {self.study.direction.name.lower()}, "
                f"and of {self.evaluation_metric!r} the {better} is better; give a study with "
                f'direction="{direction}imize"'
            )

    def _watched(self, folder: RunFolder, run: Callable[[], SearchResult]) -> SearchResult:
        """Run it, and add its trials to the study when it is over."""
        result = super()._watched(folder, run)
        if self.study is not None and all(trial.status in ENDS for trial in result.trials):
            with _explained(self.study, folder):
                self._add_to(self.study, result, folder.run_id)
        return result

    def _add_to(self, study: optuna.Study, result: SearchResult, run_id: str) -> None:
        there = {trial.user_attrs.get(_MARK) for trial in study.get_trials(deepcopy=False)}
        marks = {trial.trial_id: f"{run_id}/{trial.trial_id}" for trial in result.trials}
        study.add_trials(
            self._frozen(trial, marks[trial.trial_id])
            for trial in result.trials
            if marks[trial.trial_id] not in there
        )

    def _frozen(self, trial: Trial, mark: str) -> optuna.trial.FrozenTrial:
        from optuna.trial import TrialState, create_trial

        from cerebro_hydra.tune.searchers.optuna_space import OptunaSpace

        space = OptunaSpace(self.search_space)
        labels = space.labelled(trial.params)
        name = next(
            (each for each in trial.history if each == f"val_{self.evaluation_metric}"),
            f"train_{self.evaluation_metric}",
        )
        value = trial.result_metrics.get(name) if trial.has_result else None
        measured = value is not None and isfinite(value)
        return create_trial(
            state=TrialState.COMPLETE if measured else TrialState.FAIL,
            value=value if measured else None,
            params=labels,
            distributions={path: space.distributions[path] for path in labels},
            intermediate_values=dict(enumerate(trial.history.get(name, ()), 1)),
            user_attrs={_MARK: mark},
        )


class TPESearch(OptunaSearch):
    """Trains what the tree-structured Parzen estimator draws; `Search` has the other arguments.

    The first ten trials are random. From then on it draws where the better of those that have ended
    lie dense and the others do not, and keeps away from where trials train now. As in
    `OptunaSearch` two seeded runs are alike. The algorithm is Bergstra et al.'s, "Algorithms for
    Hyper-Parameter Optimization" (NeurIPS 2011), as Optuna has it.

    Args:
        search_space: `{name: hp_log(1e-4, 1e-1)}`, and `hp_choice` and its like.
        num_models: how many trials.

    Raises:
        SetupError: Optuna is not installed.
        ConfigurationError: as `RandomSearch`.
    """

    def __init__(
        self, *, search_space: Mapping[str, Any], num_models: int, **arguments: Any
    ) -> None:
        sampler = require_optuna(type(self).__name__).samplers.TPESampler(constant_liar=True)
        super().__init__(
            search_space=search_space, num_models=num_models, sampler=sampler, **arguments
        )


def require_optuna(what: str) -> Any:
    """Return the module of Optuna, which is an extra of this package.

    Raises:
        SetupError: it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise SetupError(
            f"{what} needs optuna; install it with pip install 'cerebro-hydra[optuna]'"
        ) from error
    return optuna


@contextmanager
def _explained(study: optuna.Study, folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise StoreError(
            f"the run is over, and its trials can't be added to the study {study.study_name!r}: "
            f"{named_error_text(error)}\nthe result is in search.result; to add those that "
            f"are missing, mend the study's storage and call search.fit(df, resume="
            f"{folder.path!r})"
        ) from error
