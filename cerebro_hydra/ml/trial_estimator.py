"""The base of both estimators: a fit, or a whole grid of fits, is one hopping run."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pyspark.ml import Estimator
from pyspark.ml.base import _FitMultipleIterator
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from cerebro_hydra.errors import ConfigurationError, TrialFailed
from cerebro_hydra.ml.params import OutputParams, RunParams
from cerebro_hydra.storage import estimator_factories

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cerebro_hydra.ml.factory_estimator import FactoryEstimator
    from cerebro_hydra.ml.model import SparkModel
    from cerebro_hydra.tune.list_search import ListSearch
    from cerebro_hydra.tune.model import TrainedModel
    from cerebro_hydra.tune.result import SearchResult
    from cerebro_hydra.tune.trial import Trial

# Two runs at once would wait for each other's task slots: a CrossValidator with parallelism fits a
# pipeline in several threads.
_one_run = threading.Lock()


class TrialEstimator(
    Estimator["SparkModel"], RunParams, OutputParams, MLWritable, MLReadable["FactoryEstimator"]
):
    """An estimator whose param maps are trials.

    Subclasses set `_factory`, the `estimator_gen_fn` of a run or its "module:name".
    """

    recorded_factory: str | None = None
    """The "module:name" in the file that this was loaded from; `setFactory` may confirm it."""
    _factory: Callable[[Any], Any] | str | None = None
    _trial_names: tuple[str, ...] = ()  # of the Params that can be a trial's parameters

    @abstractmethod
    def trial_params(self) -> dict[str, Any]:
        """Return what the factory is called with, as JSON."""

    def factory(self) -> Callable[[Any], Any]:
        """Return the `estimator_gen_fn` of a run.

        Raises:
            ReplayError: it is known by its name, and can't be imported here.
            ConfigurationError: this estimator was loaded, and its file only names it or was saved
                without it.
        """
        if self._factory is None and self.recorded_factory is not None:
            raise ConfigurationError(
                f"the file of {self.uid} names the factory {self.recorded_factory!r}, and a name "
                "in a file is not imported unasked: if it is yours, confirm it with "
                f"setFactory({self.recorded_factory!r}); else give your own"
            )
        if self._factory is None:
            raise ConfigurationError(
                f"{self.uid} was saved without what builds its model, so it can't be fitted; make "
                "it anew, or use the models that it has trained"
            )
        if isinstance(self._factory, str):
            return estimator_factories.import_factory(self._factory)
        return self._factory

    def setFactory(self, estimator_gen_fn: Callable[[Any], Any] | str) -> Self:
        """Name what builds the model of an estimator that was loaded: a function, or "module:name".

        Raises:
            ConfigurationError: it is something else, or this estimator has what builds its model.
        """
        if self._factory is not None and self.recorded_factory is None:
            raise ConfigurationError(
                f"{self.uid} was not loaded from a file, so it has what builds its model; make "
                "another estimator for another factory"
            )
        if not callable(estimator_gen_fn) and not isinstance(estimator_gen_fn, str):
            raise ConfigurationError(
                f"estimator_gen_fn is {estimator_gen_fn!r}; give a function of the parameters "
                "that returns a SparkEstimator, or its 'module:name'"
            )
        self._factory = estimator_gen_fn
        return self

    def write(self) -> MLWriter:
        """Return what saves it, which warns where the saved estimator could not be fitted."""
        from cerebro_hydra.ml.estimator_files import EstimatorWriter

        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[FactoryEstimator]:
        """Return what loads it, always as an estimator with a factory."""
        from cerebro_hydra.ml.estimator_files import EstimatorReader

        return EstimatorReader()

    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[dict[Param[Any], Any]]
    ) -> Iterator[tuple[int, SparkModel]]:
        """Train a model for each param map; all of them are trials of one run.

        Maps that differ in a Param of the run, such as num_epochs, take a run each, one after the
        other. Everything has been trained when this returns. Threads may share the iterator.

        Returns:
            (index, model) in the order of the maps. Where a trial failed, `next` raises TrialFailed
            with its traceback, and goes on with the next index when it is called again.

        Raises:
            ConfigurationError: a Param is missing or can't be used; before anything is trained.
            SetupError: Spark can't run the agents.
            DataError: rows can't be used.
            AllTrialsFailed: no trial of a run was left; the message holds every reason.
        """
        copies = [self.copy(param_map) for param_map in paramMaps]
        settings = [each.run_settings() for each in copies]
        trained: dict[int, tuple[TrainedModel | None, Trial, SearchResult]] = {}
        with _one_run:
            # All backends are made in here, because their checks hold every slot for a moment, too.
            runs = [
                (members, self._search(dataset, settings[members[0]], [copies[i] for i in members]))
                for members in equal_settings(settings)
            ]
            for members, search in runs:
                result = search.fit(dataset)
                models = {model.trial_id: model for model in result.get_all_models()}
                for index, trial in zip(members, result.trials, strict=True):
                    trained[index] = models.get(trial.trial_id), trial, result
        return _FitMultipleIterator(lambda i: copies[i]._model(*trained[i]), len(copies))

    def _fit(self, dataset: DataFrame) -> SparkModel:
        ((_, model),) = self.fitMultiple(dataset, [{}])
        return model

    def _add_trial_params(self, doc: str, defaults: Mapping[str, Any]) -> None:
        """Give this instance a Param for each parameter that a trial can have."""
        self._trial_names = tuple(defaults)
        for name, value in defaults.items():
            param = Param(self, name, doc, partial(json_value, name))
            setattr(self, name, param)
            self._defaultParamMap[param] = value

    def _search(
        self, dataset: DataFrame, settings: Mapping[str, Any], trials: Sequence[TrialEstimator]
    ) -> ListSearch:
        # Agents import this file for what their factories return, and need none of these.
        from cerebro_hydra.spark.backend import SparkBackend
        from cerebro_hydra.tune.list_search import ListSearch

        backend = settings["backend"]
        if backend is None:
            backend = SparkBackend(dataset.sparkSession, verbose=settings["verbose"])
        return ListSearch(
            candidates=[trial.trial_params() for trial in trials],
            estimator_gen_fn=self.factory(),
            **{**settings, "backend": backend},
        )

    def _model(
        self, trained: TrainedModel | None, trial: Trial, result: SearchResult
    ) -> SparkModel:
        from cerebro_hydra.ml.model import SparkModel
        from cerebro_hydra.ml.trained_network import RunNetwork

        if trained is None:
            raise TrialFailed(
                f"{trial.trial_id} with {trial.params} is {trial.status}; the other trials are in "
                f"{result.run_path}\n\n{trial.error or ''}"
            )
        model = SparkModel(RunNetwork(trained), trial, result.run_path)
        return self._copyValues(model._resetUid(self.uid))


def json_value(name: str, value: Any) -> Any:
    """Return a trial's parameter as an agent will see it.

    Raises:
        ConfigurationError: JSON can't hold it.
    """
    from cerebro_hydra.tune import space  # with all of a search, which no agent needs

    return space.as_json(f"{name} is", value)


def equal_settings(settings: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Group the indices of equal settings, in the order in which each first occurs."""
    groups: list[list[int]] = []
    for index, each in enumerate(settings):
        for group in groups:
            if settings[group[0]] == each:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups
