"""Params of what a model adds to a DataFrame."""

from __future__ import annotations

from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasPredictionCol, HasProbabilityCol, HasRawPredictionCol

from cerebro_hydra.errors import ConfigurationError

OUTPUTS = ("classification", "regression", "raw")

P = TypeVar("P", bound="OutputParams")


def _output(value: Any) -> str:
    if value not in OUTPUTS:
        raise ConfigurationError(f"output is {value!r}; it is one of {OUTPUTS}, or None")
    return str(value)


def _count(value: Any) -> int:
    number = int(TypeConverters.toInt(value))
    if number < 1:
        raise ConfigurationError(f"transform_batch_size is {value!r}; it is a whole number from 1")
    return number


class OutputParams(HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """Params that an estimator hands on to its model."""

    output: Param[str] = Param(
        Params._dummy(),
        "output",
        "what a prediction is: 'classification', 'regression' or 'raw'; None: what the loss says",
        typeConverter=_output,
    )
    transform_batch_size: Param[int] = Param(
        Params._dummy(),
        "transform_batch_size",
        "rows per forward pass in transform; None: the batch size of training",
        typeConverter=_count,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(output=None, transform_batch_size=None)

    def setPredictionCol(self: P, value: str) -> P:
        """Name the column of predictions."""
        return self._set(predictionCol=value)

    def setProbabilityCol(self: P, value: str) -> P:
        """Name the column of probabilities, a vector; "" leaves it out."""
        return self._set(probabilityCol=value)

    def setRawPredictionCol(self: P, value: str) -> P:
        """Name the column of scores, a vector; "" leaves it out."""
        return self._set(rawPredictionCol=value)

    def setOutput(self: P, value: str | None) -> P:
        """Say what a prediction is."""
        return self._set(output=value)

    def getOutput(self) -> str | None:
        """What a prediction is; None: what the loss says."""
        return self.getOrDefault(self.output)

    def setTransformBatchSize(self: P, value: int | None) -> P:
        """Set the rows per forward pass in transform."""
        return self._set(transform_batch_size=value)

    def getTransformBatchSize(self) -> int | None:
        """Rows per forward pass in transform; None: as in training."""
        return self.getOrDefault(self.transform_batch_size)
