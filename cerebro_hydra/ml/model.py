"""Makes a trained trial a stage of Spark ML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from cerebro_hydra.ml.evaluator_outputs import EvaluatorOutputs
from cerebro_hydra.ml.params import OutputParams
from cerebro_hydra.ml.trained_network import TrainedNetwork
from cerebro_hydra.spark.outputs import Outputs, RawOutputs
from cerebro_hydra.tune.prediction_kind import PredictionKind

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from torch import nn

    from cerebro_hydra.tune.trial import History, Trial


class SparkModel(Model, OutputParams, MLWritable, MLReadable["SparkModel"]):
    """A trained model, which an estimator's `fit` and `SparkModel.load` return.

    A fitted model reads its weights from the run's folder when they are first needed. A saved one
    stands alone: it needs neither the run, nor the store, nor the source of the network.

    Attributes:
        trial: the trial that it comes from, with its parameters, history and visit log.
        run_path: the folder of the run, which `cerebro_hydra.replay` takes while it exists.
    """

    def __init__(self, network: TrainedNetwork, trial: Trial, run_path: str) -> None:
        """Use an estimator's `fit`, or `SparkModel.load`."""
        super().__init__()
        self.network = network
        self.trial = trial
        self.run_path = run_path

    @property
    def history(self) -> History:
        """Return measured values by name, one per epoch."""
        return self.trial.history

    def torch(self) -> nn.Module:
        """Return the network with its trained weights, in eval mode.

        A loaded one takes every feature column, rows first, and gives the tuple of predictions.

        Raises:
            ReplayError: a fitted model's factory can't be found any more.
        """
        return self.network.torch()

    def write(self) -> MLWriter:
        """Return what saves it: graph and weights as data, with Spark's metadata."""
        from cerebro_hydra.ml.model_files import ModelWriter

        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[SparkModel]:
        """Return what loads it."""
        from cerebro_hydra.ml.model_files import ModelReader

        return ModelReader()

    def _transform(self, dataset: DataFrame) -> DataFrame:
        batch_size = self.getTransformBatchSize()
        return self.network.inference.transform(dataset, self._outputs(), batch_size)

    def _outputs(self) -> Outputs:
        kind, prediction = self.network.kind(self.getOutput()), self.getPredictionCol()
        if kind == PredictionKind.NUMBER:
            return EvaluatorOutputs(kind, prediction)
        if kind.has_classes:
            probability, raw = self.getProbabilityCol(), self.getRawPredictionCol()
            return EvaluatorOutputs(kind, prediction, probability, raw)
        count = len(self.network.inference.sample)
        several = tuple(f"{prediction}_{i}" for i in range(count))
        return RawOutputs((prediction,) if count == 1 else several)
