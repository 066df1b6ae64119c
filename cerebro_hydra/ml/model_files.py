"""A saved model's files hold Spark's metadata, the network's graph and weights; no pickle.

```
<path>/metadata/part-00000        class, uid, Params, trial, columns: as Spark ML's JSON
<path>/model/graph.pt2            torch.export's archive: JSON and raw tensors
<path>/model/weights.safetensors
```
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pyspark.ml.util import DefaultParamsWriter, MLReader, MLWriter

from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.documents import Positive, one_of
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.metadata import StageMetadata, part_of, read_metadata
from cerebro_hydra.ml.model import SparkModel
from cerebro_hydra.ml.prediction_kind import PredictionKind
from cerebro_hydra.ml.trained_network import ExportedNetwork
from cerebro_hydra.shards.exported import GRAPH_FILE, WEIGHTS_FILE
from cerebro_hydra.spark import hadoop_files
from cerebro_hydra.spark.predictors import ExportedPredictor
from cerebro_hydra.tune.trial import Trial

FORMAT = 1
FILES = (GRAPH_FILE, WEIGHTS_FILE)


class ModelWriter(MLWriter):
    """Saves a model to any file system that Spark can write."""

    def __init__(self, model: SparkModel) -> None:
        super().__init__()
        self._model = model
        self._folder = ""

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
        with tempfile.TemporaryDirectory(prefix="cerebro-hydra-model-") as folder:
            self._model.network.export(folder)
            self._folder = folder
            super().save(path)

    def saveImpl(self, path: str) -> None:
        model, inference = self._model, self._model.network.inference
        extra: dict[str, Any] = {
            "format": FORMAT,
            "head": model.network.kind(None),
            "columns": [asdict(spec) for spec in inference.specs],
            "batch_size": inference.batch_size,
            "trial": asdict(model.trial),
            "run_path": model.run_path,
        }
        for name in FILES:
            hadoop_files.upload(self.sc, str(Path(self._folder, name)), f"{path}/model/{name}")
        DefaultParamsWriter.saveMetadata(model, path, self.sc, extra)


@dataclass(frozen=True)
class _SavedModel:
    """Holds the fields of the metadata that are not Spark ML's own."""

    head: Annotated[str, one_of(*PredictionKind)]
    columns: tuple[ColumnSpec, ...]
    batch_size: Positive
    trial: Trial
    run_path: str


class ModelReader(MLReader[SparkModel]):
    """Loads a model where neither its source nor its run is known."""

    def load(self, path: str) -> SparkModel:
        """Load a saved model; nothing of it is run.

        Raises:
            ConfigurationError: another version wrote it, or it is something else.
            StoreError: a file is missing or damaged.
        """
        metadata, where = read_metadata(self.sc, path), f"the metadata of {path!r}"
        if metadata.get("format") != FORMAT:
            raise ConfigurationError(
                f"{path!r} holds {metadata.get('class')!r} of format {metadata.get('format')!r}; "
                f"this version loads a SparkModel of format {FORMAT}"
            )
        stage: StageMetadata = part_of(StageMetadata, metadata, where)
        saved: _SavedModel = part_of(_SavedModel, metadata, where)
        with tempfile.TemporaryDirectory(prefix="cerebro-hydra-model-") as folder:
            for name in FILES:
                hadoop_files.download(self.sc, f"{path}/model/{name}", str(Path(folder, name)))
            predictor = ExportedPredictor.of(folder)
        network = ExportedNetwork(
            predictor, saved.columns, saved.batch_size, PredictionKind(saved.head)
        )
        return stage.restore(SparkModel(network, saved.trial, saved.run_path), where)
