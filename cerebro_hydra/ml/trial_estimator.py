"""What all estimators here share: a fit, or a whole grid of them, is one hopping run."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.ml import Estimator
from pyspark.ml.base import _FitMultipleIterator
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from cerebro_hydra.errors import TrialFailed
from cerebro_hydra.ml.output_params import OutputParams
from cerebro_hydra.ml.run_params import RunParams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cerebro_hydra.ml.factory_estimator import FactoryEstimator
    from cerebro_hydra.ml.model import SparkModel
    from cerebro_hydra.tune.list_search import ListSearch
    from cerebro_hydra.tune.model import TrainedModel
    from cerebro_hydra.tune.result import SearchResult
    from cerebro_hydra.tune.trial import Trial

# Two runs at once would wait for each other's task slots: a pipeline is fitted in several threads
# by a CrossValidator with parallelism.
_one_run = threading.Lock()


class TrialEstimator(
    Estimator["SparkModel"], RunParams, OutputParams, MLWritable, MLReadable["FactoryEstimator"]
):
    """An estimator whose param maps are trials."""

    @abstractmethod
    def factory(self) -> Callable[[Any], Any]:
        """The `estimator_gen_fn` of a run."""

    @abstractmethod
    def factory_name(self) -> str | None:
        """By which another process can import the factory, if it can."""

    @abstractmethod
    def varied(self) -> list[str]:
        """Names of the Params that can be a trial's parameters."""

    @abstractmethod
    def trial_params(self) -> dict[str, Any]:
        """What the factory is called with, as JSON."""

    def write(self) -> MLWriter:
        """What saves it; it warns where the saved estimator could not be fitted."""
        from cerebro_hydra.ml.estimator_files import EstimatorWriter

        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> MLReader[FactoryEstimator]:
        """What loads it: an estimator of its factory, whatever it was made of."""
        from cerebro_hydra.ml.estimator_files import EstimatorReader

        return EstimatorReader()

    @classmethod
    def names(cls) -> list[str]:
        """Of the Params that every estimator has, sorted."""
        return [name for name in dir(TrialEstimator) if isinstance(getattr(cls, name), Param)]

    def fitMultiple(
        self, dataset: DataFrame, paramMaps: Sequence[dict[Param[Any], Any]]
    ) -> Iterator[tuple[int, SparkModel]]:
        """Train a model for each param map; all of them are trials of one run.

        Maps that differ in a Param of the run, such as num_epochs, take a run each, one after the
        other. All has been trained when this returns. Threads may share the iterator.

        Returns:
            (index, model) in the order of the maps. Where a trial failed, `next` raises TrialFailed
            with its traceback, and goes on with the next index when it is called again.

        Raises:
            ConfigurationError: a Param is missing or can't be used; before anything is trained.
            SetupError: Spark can't run the agents.
            DataError: rows can't be used.
            AllTrialsFailed: no trial of a run was left; the message holds every reason.
        """
        copies = [self.copy(paramMap) for paramMap in paramMaps]
        settings = [each.run_settings() for each in copies]
        found: dict[int, tuple[TrainedModel | None, Trial, SearchResult]] = {}
        with _one_run:
            # In here, because a backend's checks hold every slot for a moment, too.
            runs = [
                (members, self._search(dataset, settings[members[0]], [copies[i] for i in members]))
                for members in grouped(settings)
            ]
            for members, search in runs:
                result = search.fit(dataset)
                models = {model.trial_id: model for model in result.get_all_models()}
                for index, trial in zip(members, search.trials_of(result), strict=True):
                    found[index] = models.get(trial.trial_id), trial, result
        return _FitMultipleIterator(lambda i: copies[i]._model(*found[i]), len(copies))

    def _fit(self, dataset: DataFrame) -> SparkModel:
        ((_, model),) = self.fitMultiple(dataset, [{}])
        return model

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

        if trained is None:
            raise TrialFailed(
                f"{trial.trial_id} with {trial.params} is {trial.status}; the other trials are in "
                f"{result.run_path}\n\n{trial.error or ''}"
            )
        model = SparkModel.fitted(trained, trial, result.run_path)._resetUid(self.uid)
        return self._copyValues(model)


def as_json(what: str, value: Any) -> Any:
    """A value of a trial's Param as an agent will see it; refuses what JSON can't hold."""
    from cerebro_hydra.tune import space

    return space.as_json(what, value)


def grouped(settings: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Indices of equal settings together, in the order in which each first occurs."""
    groups: list[list[int]] = []
    for index, each in enumerate(settings):
        for group in groups:
            if settings[group[0]] == each:
                group.append(index)
                break
        else:
            groups.append([index])
    return groups
