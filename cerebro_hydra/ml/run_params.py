"""Params of the run that a fit is: data, epochs, store; what a search takes, under its names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasSeed

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.storage import Store

if TYPE_CHECKING:
    from cerebro_hydra.spark import SparkBackend

R = TypeVar("R", bound="RunParams")


def _store(value: Any) -> Store:
    if not isinstance(value, Store):
        raise ConfigurationError(
            f"store is {value!r}, a {type(value).__name__}; give a store, such as "
            'LocalStore(prefix_path="/some/folder")'
        )
    return value


def _param(name: str, doc: str, converter: Any) -> Param[Any]:
    return Param(Params._dummy(), name, doc, typeConverter=converter)


def _as_given(value: Any) -> Any:
    """The search checks it, with its own sentence."""
    return value


class RunParams(HasSeed):
    """Params that trials of one run share; maps that differ in them become several runs."""

    num_epochs: Param[int] = _param(
        "num_epochs", "passes over all training rows", TypeConverters.toInt
    )
    store: Param[Store] = _param("store", "where prepared data and run folders lie", _store)
    backend: Param[Any] = _param(
        "backend", "where agents run; None: the session of the DataFrame", _as_given
    )
    feature_columns: Param[list[str]] = _param(
        "feature_columns", "what the model's forward takes", TypeConverters.toListString
    )
    label_columns: Param[list[str]] = _param(
        "label_columns", "what the loss takes after the outputs", TypeConverters.toListString
    )
    sample_weight_column: Param[str] = _param(
        "sample_weight_column", "what a row's loss counts; None: all alike", TypeConverters.toString
    )
    validation: Param[Any] = _param(
        "validation",
        "share of rows to hold out in the fit, or a column that marks them; None: no rows",
        _as_given,
    )
    evaluation_metric: Param[str] = _param(
        "evaluation_metric",
        "what early stopping watches: 'loss' or a metric's name",
        TypeConverters.toString,
    )
    order: Param[str] = _param(
        "order",
        "'dynamic' sends a trial to whichever worker is free, 'seeded' gives the same bits again",
        TypeConverters.toString,
    )
    verbose: Param[int] = _param("verbose", "0: silent, 1: progress", TypeConverters.toInt)

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            backend=None,
            feature_columns=["features"],
            label_columns=["label"],
            sample_weight_column=None,
            validation=None,
            seed=0,
            evaluation_metric="loss",
            order="dynamic",
            verbose=1,
        )

    def run_settings(self) -> dict[str, Any]:
        """What a search takes, by name, but for the backend.

        Raises:
            ConfigurationError: num_epochs or store is missing.
        """
        remedies = {
            "num_epochs": "give num_epochs=, or call setNumEpochs(...)",
            "store": 'give store=LocalStore(prefix_path="/some/folder"), or call setStore(...)',
        }
        for name, remedy in remedies.items():
            if not self.isDefined(name) or self.getOrDefault(name) is None:
                raise ConfigurationError(f"{self.uid} has no {name}, which fit needs; {remedy}")
        return {param.name: self.getOrDefault(param) for param in self._run_params()}

    def _run_params(self) -> list[Param[Any]]:
        names = {name for name, value in vars(RunParams).items() if isinstance(value, Param)}
        return [p for p in self.params if p.name in (*names, "seed")]

    def setNumEpochs(self: R, value: int) -> R:
        """Set the passes over all training rows."""
        return self._set(num_epochs=value)

    def getNumEpochs(self) -> int:
        """Passes over all training rows."""
        return self.getOrDefault(self.num_epochs)

    def setStore(self: R, value: Store) -> R:
        """Set where prepared data and run folders lie."""
        return self._set(store=value)

    def getStore(self) -> Store:
        """Where prepared data and run folders lie."""
        return self.getOrDefault(self.store)

    def setBackend(self: R, value: SparkBackend | None) -> R:
        """Set where agents run."""
        return self._set(backend=value)

    def getBackend(self) -> SparkBackend | None:
        """Where agents run; None: the session of the DataFrame."""
        return self.getOrDefault(self.backend)

    def setFeatureColumns(self: R, value: Sequence[str]) -> R:
        """Set what the model's forward takes."""
        return self._set(feature_columns=value)

    def getFeatureColumns(self) -> list[str]:
        """What the model's forward takes."""
        return self.getOrDefault(self.feature_columns)

    def setLabelColumns(self: R, value: Sequence[str]) -> R:
        """Set what the loss takes after the outputs."""
        return self._set(label_columns=value)

    def getLabelColumns(self) -> list[str]:
        """What the loss takes after the outputs."""
        return self.getOrDefault(self.label_columns)

    def setSampleWeightColumn(self: R, value: str | None) -> R:
        """Set what a row's loss counts."""
        return self._set(sample_weight_column=value)

    def getSampleWeightColumn(self) -> str | None:
        """What a row's loss counts; None: all alike."""
        return self.getOrDefault(self.sample_weight_column)

    def setValidation(self: R, value: float | str | None) -> R:
        """Set the share of rows to hold out, or the column that marks them."""
        return self._set(validation=value)

    def getValidation(self) -> float | str | None:
        """Share of rows that are held out, or the column that marks them; None: no rows."""
        return self.getOrDefault(self.validation)

    def setEvaluationMetric(self: R, value: str) -> R:
        """Set what early stopping watches."""
        return self._set(evaluation_metric=value)

    def getEvaluationMetric(self) -> str:
        """What early stopping watches."""
        return self.getOrDefault(self.evaluation_metric)

    def setOrder(self: R, value: str) -> R:
        """Set how trials find their workers."""
        return self._set(order=value)

    def getOrder(self) -> str:
        """How trials find their workers."""
        return self.getOrDefault(self.order)

    def setSeed(self: R, value: int) -> R:
        """Set the seed of everything random."""
        return self._set(seed=value)

    def setVerbose(self: R, value: int) -> R:
        """Set how much is printed."""
        return self._set(verbose=value)

    def getVerbose(self) -> int:
        """How much is printed."""
        return self.getOrDefault(self.verbose)
