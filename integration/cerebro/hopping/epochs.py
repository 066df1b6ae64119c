"""Trials that train one epoch at a time: one run, which each epoch extends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cerebro_hydra import SparkEstimator
from cerebro_hydra.data.manifest import Manifest
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.hopper.backend import Backend
from cerebro_hydra.recipe import Columns, build_recipe
from cerebro_hydra.storage import RunFolder, Store
from cerebro_hydra.storage.names import trial_name
from cerebro_hydra.tune.model import TrainedModel
from cerebro_hydra.tune.result import SearchResult
from cerebro_hydra.tune.resume import RunToResume
from cerebro_hydra.tune.running import Surroundings
from cerebro_hydra.tune.searches import ListSearch

Factory = Callable[[dict[str, Any]], SparkEstimator]


class Epochs:
    """Trains candidates together, one epoch per call of `train`.

    The first epoch is a search of one epoch. Each further one extends its run, which has the bits
    of a run that knew all its epochs beforehand.

    Args:
        backend: a `cerebro_hydra.SparkBackend`.
        store: holds the prepared data, and gets the run's folder.
        manifest: the prepared data.
        factory: builds a candidate from its parameters.
        candidates: the parameters of each candidate.
        columns: names of features and labels.
        verbose: 0 prints nothing.
    """

    def __init__(
        self,
        backend: Backend,
        store: Store,
        manifest: Manifest,
        factory: Factory,
        candidates: Sequence[Mapping[str, Any]],
        columns: Columns,
        seed: int,
        verbose: int,
    ) -> None:
        self._backend = backend
        self._store = store
        self._manifest = manifest
        self._factory = factory
        self._candidates = list(candidates)
        self._columns = columns
        self._seed = seed
        self._verbose = verbose
        self.result: SearchResult | None = None
        """The run after the newest epoch."""

    def train(self) -> list[dict[str, float] | None]:
        """Train all candidates for one epoch.

        Returns:
            The metrics of each candidate; None for one that has failed.

        Raises:
            ConfigurationError: a candidate uses a feature that needs to know all epochs beforehand.
            AllTrialsFailed: no candidate is left.
        """
        self.result = result = self._begin() if self.result is None else self._extend(self.result)
        return [
            {name: values[-1] for name, values in trial.history.items()}
            if trial.status == "finished"
            else None
            for trial in result.trials
        ]

    def model(self, candidate: int) -> TrainedModel:
        """Return the model of a candidate after the newest epoch.

        Raises:
            ConfigurationError: the candidate has failed; the message says why.
        """
        assert self.result is not None
        for model in self.result.get_all_models():
            if model.trial_id == trial_name(candidate):
                return model
        raise ConfigurationError(
            f"the model with {dict(self._candidates[candidate])} has failed, so there is none: "
            f"{self.result.trials[candidate].error}"
        )

    def _begin(self) -> SearchResult:
        for params in self._candidates:
            self._refuse_early_stopping(params)
        search = ListSearch(
            candidates=self._candidates,
            backend=self._backend,
            store=self._store,
            estimator_gen_fn=self._factory,
            num_epochs=1,
            validation=0.5 if self._manifest.has_validation else None,  # its rows are chosen
            feature_columns=self._columns.features,
            label_columns=self._columns.labels,
            seed=self._seed,
            verbose=self._verbose,
        )
        return search.fit_on_prepared_data(self._manifest)

    def _extend(self, before: SearchResult) -> SearchResult:
        run = RunToResume(RunFolder(self._store, before.document.run_id))
        around = Surroundings(self._backend, self._factory, self._verbose)
        return run.go_on(around, num_epochs=run.document.num_epochs + 1)

    def _refuse_early_stopping(self, params: Mapping[str, Any]) -> None:
        try:
            recipe = build_recipe(self._factory, params, self._seed, self._columns)
        except Exception:
            return  # admission fails on it as well, and refuses this one alone
        if recipe.early_stopping is not None:
            raise ConfigurationError(
                f"early_stopping is {recipe.early_stopping}; Cerebro's searches train every epoch, "
                "so leave it out"
            )
