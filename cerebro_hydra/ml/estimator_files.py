"""The file of a saved estimator: Spark's metadata with its factory's name, without pickle."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from pyspark.ml.util import DefaultParamsWriter, MLReader, MLWriter

from cerebro_hydra.documents import part_of, unreadable
from cerebro_hydra.ml.factory_estimator import FactoryEstimator
from cerebro_hydra.ml.metadata import StageMetadata, read_metadata
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
        if factory is None:
            name = estimator.recorded_factory
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


@dataclass(frozen=True)
class _SavedEstimator:
    """Holds the fields of the metadata that are not Spark ML's own."""

    factory: str | None
    params: list[str]


class EstimatorReader(MLReader[FactoryEstimator]):
    """Loads any saved estimator as one with a factory, which the file only names."""

    def load(self, path: str) -> FactoryEstimator:
        """Load an estimator; nothing of the user's is imported, and no folder is created.

        Raises:
            ConfigurationError: a parameter has a name that every estimator uses.
            StoreError: a file is missing or damaged, or the path holds something else.
        """
        metadata, where = read_metadata(self.sc, path), f"the metadata of {path!r}"
        stage: StageMetadata = part_of(StageMetadata, metadata, where)
        saved: _SavedEstimator = part_of(_SavedEstimator, metadata, where)
        if missing := [name for name in saved.params if name not in stage.defaultParamMap]:
            raise unreadable(f"the default of a Param in {where}", missing[0])
        if stage.paramMap.get("store") is not None:
            stage.paramMap["store"] = Store.from_dict(stage.paramMap["store"])
        defaults = {name: stage.defaultParamMap[name] for name in saved.params}
        estimator = FactoryEstimator(None, defaults)
        estimator.recorded_factory = saved.factory
        return stage.restore(estimator, where)
