"""Makes a trained trial a stage of Spark ML, with its columns and its files.

Its network lies in the folder of its run, or in files that need no source code, which are those of
`shards/export/archive.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from pyspark.ml import Model
from pyspark.ml.util import DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from torch import Tensor

from cerebro_hydra.documents import part_of
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.metadata import StageMetadata
from cerebro_hydra.ml.params import OutputParams
from cerebro_hydra.recipe.objective.prediction_kind import PredictionKind
from cerebro_hydra.shards.export.archive import ModelArchive
from cerebro_hydra.spark import hadoop_files, outputs
from cerebro_hydra.spark.outputs import Outputs, RawOutputs
from cerebro_hydra.tune.model import TrainedModel
from cerebro_hydra.tune.weights import ArchiveWeights

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType
    from torch import nn

    from cerebro_hydra.tune.trial import History, Trial


class SparkModel(Model, OutputParams, MLWritable, MLReadable["SparkModel"]):
    """A trained model, which an estimator's `fit` and `SparkModel.load` return.

    A fitted model reads its weights from the run's folder when they are first needed. A saved one
    stands alone: it needs neither the run, nor the store, nor the source of the network.

    Attributes:
        trained: the model without its columns of Spark ML; it predicts without Spark, and gives
            its state dict.
        trial: the trial that it comes from, with its parameters, history and visit log.
        run_path: the folder of the run, which `cerebro_hydra.replay` takes while it exists.
    """

    def __init__(self, trained: TrainedModel) -> None:
        """Use an estimator's `fit`, or `SparkModel.load`."""
        super().__init__()
        self.trained = trained
        self.trial: Trial = trained.trial
        self.run_path = trained.run_path

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
        return self.trained.torch()

    def write(self) -> MLWriter:
        """Return what saves it: graph and weights as data, with Spark's metadata."""

        return ModelWriter(self)

    @classmethod
    def read(cls) -> MLReader[SparkModel]:
        """Return what loads it."""

        return ModelReader()

    def _transform(self, dataset: DataFrame) -> DataFrame:
        batch_size = self.getTransformBatchSize()
        return self.trained.inference.transform(dataset, self._outputs(), batch_size)

    def _outputs(self) -> Outputs:
        kind, prediction = self.trained.kind(self.getOutput()), self.getPredictionCol()
        if kind == PredictionKind.NUMBER:
            return EvaluatorOutputs(kind, prediction)
        if kind.has_classes:
            probability, raw = self.getProbabilityCol(), self.getRawPredictionCol()
            return EvaluatorOutputs(kind, prediction, probability, raw)
        count = len(self.trained.inference.sample)
        several = tuple(f"{prediction}_{i}" for i in range(count))
        return RawOutputs((prediction,) if count == 1 else several)


@dataclass(frozen=True)
class EvaluatorOutputs:
    """Makes the columns that Spark's evaluators read: vectors of scores, and a double.

    Args:
        kind: any but RAW; of NUMBER there are no vectors.
        prediction: the column of the most likely class, or of the number.
        probability: the column of probabilities; "" leaves it out.
        raw: the column of scores; "" leaves it out.
    """

    kind: PredictionKind
    prediction: str
    probability: str = ""
    raw: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(name for name in (self.raw, self.probability, self.prediction) if name)

    def types(self, sample: Sequence[Tensor]) -> list[DataType]:
        """Return two vectors and a double, without those that are left out."""
        from pyspark.sql.types import DoubleType

        vector = outputs.vector_type()
        return [*([vector] * (len(self.names) - 1)), DoubleType()]

    def arrays(self, predictions: Sequence[Tensor]) -> list[pa.Array]:
        """Return the columns, computed in double precision, so that probabilities add up to 1."""
        (given,) = predictions
        given = given.to(torch.float64)
        if self.kind == PredictionKind.NUMBER:
            return [outputs.from_tensor(given)]
        scores, probabilities = self.kind.scores(given)
        vectors = [(self.raw, scores), (self.probability, probabilities)]
        return [
            *(outputs.from_vectors(values) for name, values in vectors if name),
            outputs.from_tensor(scores.argmax(1).to(torch.float64)),
        ]


class ModelWriter(MLWriter):
    """Saves a model to any file system that Spark can write."""

    def __init__(self, model: SparkModel) -> None:
        super().__init__()
        self._model = model
        self._archive: ModelArchive

    def save(self, path: str) -> None:
        """Save it; what can't be saved is refused before anything is written or overwritten.

        Raises:
            ConfigurationError: the network can't be exported, or `path` exists and `overwrite` was
                not called.
        """
        if not self.shouldOverwrite and hadoop_files.exists(self.sc, path):
            raise ConfigurationError(
                f"{path!r} exists; choose another path, or write().overwrite().save(path)"
            )
        self._archive = self._model.trained.archive()
        super().save(path)

    def saveImpl(self, path: str) -> None:
        stage = json.loads(DefaultParamsWriter._get_metadata_to_save(self._model, self.sc))
        archive = ModelArchive({**self._archive.metadata, **stage}, self._archive.exported)
        hadoop_files.write_folder(self.sc, path, archive.files())


class ModelReader(MLReader[SparkModel]):
    """Loads a model where neither its source nor its run is known."""

    def load(self, path: str) -> SparkModel:
        """Load a saved model; nothing of it is run.

        Raises:
            ConfigurationError: another version wrote it, or it is something else.
            StoreError: a file is missing, or not as it was written.
        """
        archive = ModelArchive.read(
            lambda name: hadoop_files.read_file(self.sc, f"{path}/{name}"), path
        )
        where = f"the metadata of {path!r}"
        stage: StageMetadata = part_of(StageMetadata, dict(archive.metadata), where)
        trained = TrainedModel(ArchiveWeights(archive, path))
        return stage.restore(SparkModel(trained), where)
