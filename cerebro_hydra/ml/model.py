"""A trained trial as a stage of Spark ML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from cerebro_hydra.ml.heads import NUMBER, RAW, ClassOutputs, NumberOutput
from cerebro_hydra.ml.output_params import OutputParams
from cerebro_hydra.ml.sources import Fitted, ModelSource
from cerebro_hydra.spark.outputs import Outputs, RawOutputs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from torch import nn

    from cerebro_hydra.tune.model import TrainedModel
    from cerebro_hydra.tune.trial import History, Trial


class SparkModel(Model, OutputParams, MLWritable, MLReadable["SparkModel"]):
    """What an estimator's `fit` gives, and what `SparkModel.load` reads.

    `trial` is the trial that it comes from, with its parameters, history and visit log; `run_path`
    the folder of the run, which `cerebro_hydra.replay` takes, where that still exists.

    A fitted model reads its weights from the run's folder when they are first needed. A saved one
    stands alone: it needs neither the run, nor the store, nor the source of the network.
    """

    def __init__(self, source: ModelSource, trial: Trial, run_path: str) -> None:
        """Use an estimator's `fit`, or `SparkModel.load`."""
        super().__init__()
        self.source = source
        self.trial = trial
        self.run_path = run_path

    @classmethod
    def fitted(cls, trained: TrainedModel, trial: Trial, run_path: str) -> SparkModel:
        """Of a finished trial."""
        return cls(Fitted(trained), trial, run_path)

    @property
    def history(self) -> History:
        """Measured values by name, one per epoch."""
        return self.trial.history

    def torch(self) -> nn.Module:
        """The network with its trained weights, in eval mode.

        A loaded one takes every feature column, rows first, and gives the tuple of predictions.

        Raises:
            ReplayError: a fitted model's factory can't be found any more.
        """
        return self.source.torch()

    def head(self) -> str:
        """What a prediction is, one of `heads`."""
        return self.source.head(self.getOutput())

    def write(self) -> MLWriter:
        """What saves it: torch.export's archive and a safetensors file, beside Spark's metadata."""
        from cerebro_hydra.ml.model_files import ModelWriter

        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[SparkModel]:
        """What loads it."""
        from cerebro_hydra.ml.model_files import ModelReader

        return ModelReader()

    def _transform(self, dataset: DataFrame) -> DataFrame:
        return self.source.inference.transform(
            dataset, self._outputs(), self.getTransformBatchSize()
        )

    def _outputs(self) -> Outputs:
        head, prediction = self.head(), self.getPredictionCol()
        if head == NUMBER:
            return NumberOutput(prediction)
        if head == RAW:
            count = len(self.source.inference.sample)
            several = tuple(f"{prediction}_{i}" for i in range(count))
            return RawOutputs((prediction,) if count == 1 else several)
        return ClassOutputs(head, self.getRawPredictionCol(), self.getProbabilityCol(), prediction)
