"""Lists the Params of estimators and models in one table, each with its setter and getter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
)

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.storage import Store

OUTPUTS = ("classification", "regression", "raw")

P = TypeVar("P", bound=Params)


class _TableParam(Param[Any]):
    """A Param that knows its default; where that is None, None is a value that it takes."""

    def __init__(self, name: str, doc: str, converter: Callable[[Any], Any], default: Any) -> None:
        super().__init__(Params._dummy(), name, doc, partial(_convert, converter, default))
        self.default = default


def _convert(converter: Callable[[Any], Any], default: Any, value: Any) -> Any:
    return None if value is None and default is None else converter(value)


def _row(
    name: str, doc: str, converter: Callable[[Any], Any], default: Any = None
) -> tuple[_TableParam, Callable[[P, Any], P], Callable[[Any], Any]]:
    """Return a Param, its setter and its getter."""

    def setter(self: P, value: Any) -> P:
        return self._set(**{name: value})

    def getter(self: Params) -> Any:
        return self.getOrDefault(name)

    title = "".join(part[0].upper() + part[1:] for part in name.split("_"))
    setter.__name__, setter.__doc__ = f"set{title}", f"Set {name}: {doc}."
    getter.__name__, getter.__doc__ = f"get{title}", f"Return {name}: {doc}."
    return _TableParam(name, doc, converter, default), setter, getter


def _store(value: Any) -> Store:
    if not isinstance(value, Store):
        raise ConfigurationError(
            f"store is {value!r}, {kind_of(value)}; give a store, such as "
            'LocalStore(prefix_path="/some/folder")'
        )
    return value


def _output(value: Any) -> str:
    if value not in OUTPUTS:
        raise ConfigurationError(f"output is {value!r}; it is one of {OUTPUTS}, or None")
    return str(value)


def _batch_size(value: Any) -> int:
    number = int(TypeConverters.toInt(value))
    if number < 1:
        raise ConfigurationError(f"transform_batch_size is {value!r}; it is a whole number from 1")
    return number


_integer = TypeConverters.toInt
_string = TypeConverters.toString
_strings = TypeConverters.toListString


def _labels(value: Any) -> list[str] | None:
    return None if value is None else list(_strings(value))


_as_given = TypeConverters.identity  # the search checks it, with its own sentence


class TableParams(Params):
    """Sets the default of every Param that comes from the table."""

    def __init__(self) -> None:
        super().__init__()
        for name in self.param_names():
            self._setDefault(**{name: getattr(type(self), name).default})

    @classmethod
    def param_names(cls) -> list[str]:
        """Return the names of the Params that a class has from the table, sorted."""
        return [name for name in dir(cls) if isinstance(getattr(cls, name), _TableParam)]


class RunParams(TableParams, HasSeed):
    """The Params of a run, which are arguments of a search; its trials share them."""

    num_epochs, setNumEpochs, getNumEpochs = _row(
        "num_epochs", "passes over all training rows; fit needs it", _integer
    )
    store, setStore, getStore = _row(
        "store", "where prepared data and run folders lie; fit needs it", _store
    )
    backend, setBackend, getBackend = _row(
        "backend", "where agents run; None: the session of the DataFrame", _as_given
    )
    feature_columns, setFeatureColumns, getFeatureColumns = _row(
        "feature_columns", "what the model's forward takes", _strings, ("features",)
    )
    label_columns, setLabelColumns, getLabelColumns = _row(
        "label_columns", "what the loss takes after the outputs, or None", _labels, ("label",)
    )
    sample_weight_column, setSampleWeightColumn, getSampleWeightColumn = _row(
        "sample_weight_column", "what a row's loss counts; None: all rows count alike", _string
    )
    validation, setValidation, getValidation = _row(
        "validation",
        "share of rows to hold out in the fit, or the column that marks them; None: no rows",
        _as_given,
    )
    evaluation_metric, setEvaluationMetric, getEvaluationMetric = _row(
        "evaluation_metric", "'loss' or the metric that tells the best epoch", _string, "loss"
    )
    keep, setKeep, getKeep = _row(
        "keep",
        "the model is that of the 'best' epoch or of the 'last'; None: the best where there are "
        "validation rows or early stopping",
        _string,
    )
    seed, setSeed, getSeed = _row("seed", "seed of everything random", _integer, 0)
    order, setOrder, getOrder = _row(
        "order",
        "'dynamic' sends a trial to whichever worker is free, 'seeded' gives the same bits again",
        _string,
        "dynamic",
    )
    verbose, setVerbose, getVerbose = _row("verbose", "0: silent, 1: progress", _integer, 1)

    def run_settings(self) -> dict[str, Any]:
        """Return the arguments of a search, by name.

        Raises:
            ConfigurationError: num_epochs or store is missing.
        """
        settings = {name: self.getOrDefault(name) for name in RunParams.param_names()}
        for name, remedy in (
            ("num_epochs", "give num_epochs=, or call setNumEpochs(...)"),
            ("store", 'give store=LocalStore(prefix_path="/some/folder"), or call setStore(...)'),
        ):
            if settings[name] is None:
                raise ConfigurationError(f"{self.uid} has no {name}, which fit needs; {remedy}")
        return settings


class OutputParams(TableParams, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """The Params of the columns that a model adds; an estimator hands them on to its model."""

    output, setOutput, getOutput = _row(
        "output",
        "what a prediction is: 'classification', 'regression' or 'raw'; None: what the loss says",
        _output,
    )
    predictionCol, setPredictionCol, getPredictionCol = _row(
        "predictionCol", "column of the class, the number or the raw output", _string, "prediction"
    )
    probabilityCol, setProbabilityCol, getProbabilityCol = _row(
        "probabilityCol", "column of probabilities; '' leaves it out", _string, "probability"
    )
    rawPredictionCol, setRawPredictionCol, getRawPredictionCol = _row(
        "rawPredictionCol", "column of scores; '' leaves it out", _string, "rawPrediction"
    )
    transform_batch_size, setTransformBatchSize, getTransformBatchSize = _row(
        "transform_batch_size",
        "rows per forward pass in transform; None: the batch size of training",
        _batch_size,
    )
