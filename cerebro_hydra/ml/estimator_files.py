"""The file of a saved estimator: Spark's metadata with its factory's name, without pickle."""

from __future__ import annotations

import warnings
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from cerebro_hydra.ml.factory_estimator import FactoryEstimator
from cerebro_hydra.ml.trial_estimator import TrialEstimator
from cerebro_hydra.storage import LocalStore, Store, estimator_factories

__all__ = ["EstimatorReader", "EstimatorWriter", "LocalStore"]  # stores are found once imported


class EstimatorWriter(MLWriter):
    """Saves an estimator's Params, its store's description and its factory's name.

    An estimator whose factory has no name is saved with a warning, because Spark saves the
    estimator of every fitted validator: once loaded, it has its Params, and can't be fitted.
    """

    def __init__(self, estimator: TrialEstimator) -> None:
        super().__init__()
        self._estimator = estimator

    def saveImpl(self, path: str) -> None:
        estimator = self._estimator
        factory = estimator._factory
        name = estimator_factories.name_of(factory) if callable(factory) else factory
        if name is None:
            warnings.warn(
                f"{estimator.uid} is saved without what builds its model, which is no function "
                "that can be imported by name: loaded again, as part of a validator or pipeline "
                "too, it can't be fitted. Fitted models are whole. To save what can be fitted, "
                "use SparkEstimator.from_factory with a function of a module",
                stacklevel=2,
            )
        values: dict[str, Any] = {p.name: value for p, value in estimator._paramMap.items()}
        values.pop("backend", None)
        if values.get("store") is not None:
            values["store"] = values["store"].to_dict()
        extra = {"factory": name, "params": list(estimator._trial_names)}
        DefaultParamsWriter.saveMetadata(estimator, path, self.sc, extra, values)


class EstimatorReader(MLReader[FactoryEstimator]):
    """Loads any saved estimator as one with a factory, which is imported when it is fitted."""

    def load(self, path: str) -> FactoryEstimator:
        """Load an estimator, and import nothing of the user's."""
        metadata = DefaultParamsReader.loadMetadata(path, self.sc)
        defaults = metadata["defaultParamMap"]
        params = {name: defaults[name] for name in metadata["params"]}
        estimator = FactoryEstimator(metadata["factory"], params)
        estimator._resetUid(metadata["uid"])
        if metadata["paramMap"].get("store") is not None:
            metadata["paramMap"]["store"] = Store.from_dict(metadata["paramMap"]["store"])
        DefaultParamsReader.getAndSetParams(estimator, metadata)
        return estimator
