"""The base of all estimators: each fit is a run of a search, whose function builds the models.

An estimator can be saved unfitted: as Spark's metadata with its factory's name, without pickle.
"""

from __future__ import annotations

import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pyspark.ml import Estimator
from pyspark.ml.util import DefaultParamsWriter, MLWritable, MLWriter

from cerebro_hydra.errors import ConfigurationError, TrialFailed
from cerebro_hydra.ml.metadata import StageMetadata
from cerebro_hydra.ml.params import OutputParams, RunParams
from cerebro_hydra.storage import LocalStore, Store, estimator_factories

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cerebro_hydra.ml.model import SparkModel
    from cerebro_hydra.tune.model import TrainedModel
    from cerebro_hydra.tune.result import SearchResult
    from cerebro_hydra.tune.trial import Trial


# Two runs at once would wait for each other's task slots: a CrossValidator with parallelism fits a
# pipeline in several threads.
one_run = threading.Lock()


class RunEstimator(Estimator["SparkModel"], RunParams, OutputParams, MLWritable):
    """An estimator whose fit is a run.

    Subclasses set `_factory`, the `estimator_gen_fn` of a run or its "module:name".
    """

    recorded_factory: str | None = None
    """The "module:name" in the file that this was loaded from; `setFactory` may confirm it."""
    _factory: Callable[[Any], Any] | str | None = None

    @abstractmethod
    def recorded(self) -> dict[str, Any]:
        """Return as JSON what its file has beside its factory's name and its Params."""

    def unwritten(self) -> Collection[str]:
        """Return the names of the Params that are not written as they are."""
        return ("backend",)

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

        return EstimatorWriter(self)

    def _backend(self, dataset: DataFrame) -> Any:
        """Return the backend that was given, or one in the session of the DataFrame."""
        # Agents import the file of what their factories return, and need none of this.
        from cerebro_hydra.spark.backend import SparkBackend

        given = self.getBackend()
        return given or SparkBackend(dataset.sparkSession, verbose=self.getVerbose())

    def _model(
        self, trained: TrainedModel | None, trial: Trial, result: SearchResult
    ) -> SparkModel:
        from cerebro_hydra.ml.model import SparkModel

        if trained is None:
            raise TrialFailed(
                f"{trial.trial_id} with {trial.params} is {trial.status}; the other trials are in "
                f"{result.run_path}\n\n{trial.error or ''}"
            )
        model = SparkModel(trained)
        return self._copyValues(model._resetUid(self.uid))


class EstimatorWriter(MLWriter):
    """Saves an estimator's Params, its store's description and its factory's name.

    An estimator whose factory has no name is saved with a warning, because Spark saves the
    estimator of every fitted validator: once loaded, it has its Params, and can't be fitted.
    """

    def __init__(self, estimator: RunEstimator) -> None:
        super().__init__()
        self._estimator = estimator

    def saveImpl(self, path: str) -> None:
        estimator = self._estimator
        factory = estimator._factory
        name = estimator_factories.name_of(factory) if callable(factory) else factory
        if factory is None:
            name = estimator.recorded_factory
        if name is None:
            warnings.warn(
                f"{estimator.uid} is saved without what builds its model, which is no function "
                "that can be imported by name: loaded again, as part of a validator or pipeline "
                "too, it can't be fitted. Fitted models are whole. To save what can be fitted, "
                "use a function of a module, which SparkEstimator.from_factory takes",
                stacklevel=2,
            )
        unwritten = estimator.unwritten()
        values: dict[str, Any] = {
            param.name: value
            for param, value in estimator._paramMap.items()
            if param.name not in unwritten
        }
        if values.get("store") is not None:
            values["store"] = values["store"].to_dict()
        extra = {"factory": name, **estimator.recorded()}
        DefaultParamsWriter.saveMetadata(estimator, path, self.sc, extra, values)


__all__ = ["LocalStore", "RunEstimator", "restored"]  # stores are found once imported

E = TypeVar("E", bound=RunEstimator)


def restored(estimator: E, stage: StageMetadata, where: str) -> E:
    """Give a new estimator what its file has of its uid, Params and store; creates no folder.

    Raises:
        StoreError: the file has a Param or a store that can't be.
    """
    if stage.paramMap.get("store") is not None:
        stage.paramMap["store"] = Store.from_dict(stage.paramMap["store"])
    return stage.restore(estimator, where)
