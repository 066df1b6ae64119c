"""A saved model's files hold Spark's metadata and the exported network; nothing executable.

```
<path>/metadata/part-00000          class, uid, Params, trial, columns: as Spark ML's JSON
<path>/model/graph.json             calls of known operators
<path>/model/*.safetensors          weights and constants
```

The JSON files end with their own digest. The metadata holds the graph's, which holds the tensors'.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pyspark.ml.util import DefaultParamsWriter, MLReader, MLWriter

from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.documents import Positive, one_of
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.ml.metadata import StageMetadata, part_of
from cerebro_hydra.ml.model import SparkModel
from cerebro_hydra.ml.prediction_kind import PredictionKind
from cerebro_hydra.ml.trained_network import ExportedNetwork
from cerebro_hydra.shards.exported import EXPORTED_FILES, GRAPH_FILE, load_exported
from cerebro_hydra.spark import hadoop_files
from cerebro_hydra.spark.predictors import ExportedPredictor
from cerebro_hydra.storage.digest import file_digest
from cerebro_hydra.storage.digested_json import decode_format, encode_format
from cerebro_hydra.tune.trial import Trial

FORMAT = 2
METADATA_FILE = "metadata/part-00000"


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
            "head": model.network.kind(None),
            "columns": [asdict(spec) for spec in inference.specs],
            "batch_size": inference.batch_size,
            "trial": asdict(model.trial),
            "run_path": model.run_path,
            "graph": file_digest(Path(self._folder, GRAPH_FILE)),
        }
        metadata = DefaultParamsWriter._get_metadata_to_save(model, self.sc, extra)
        sealed = Path(self._folder, "metadata")
        sealed.write_bytes(encode_format(json.loads(metadata), FORMAT))
        for name in EXPORTED_FILES:
            hadoop_files.upload(self.sc, str(Path(self._folder, name)), f"{path}/model/{name}")
        hadoop_files.upload(self.sc, str(sealed), f"{path}/{METADATA_FILE}")


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
            StoreError: a file is missing, or not as it was written.
        """
        where = f"the metadata of {path!r}"
        with tempfile.TemporaryDirectory(prefix="cerebro-hydra-model-") as folder:
            sealed = Path(folder, "metadata")
            hadoop_files.download(self.sc, f"{path}/{METADATA_FILE}", str(sealed))
            metadata = decode_format(path, sealed.read_bytes(), FORMAT)
            for name in EXPORTED_FILES:
                hadoop_files.download(self.sc, f"{path}/model/{name}", str(Path(folder, name)))
            if file_digest(Path(folder, GRAPH_FILE)) != metadata.get("graph"):
                raise StoreError(
                    f"{GRAPH_FILE} in {path!r} is not the one that was saved with its metadata, or "
                    "was damaged; save the model again"
                )
            load_exported(folder)  # here, so that no executor is the first to meet a damaged file
            predictor = ExportedPredictor.of(folder)
        stage: StageMetadata = part_of(StageMetadata, metadata, where)
        saved: _SavedModel = part_of(_SavedModel, metadata, where)
        network = ExportedNetwork(
            predictor, saved.columns, saved.batch_size, PredictionKind(saved.head)
        )
        return stage.restore(SparkModel(network, saved.trial, saved.run_path), where)
