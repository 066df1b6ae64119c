"""A saved model's files hold Spark's metadata and the exported network; nothing executable.

```
<path>/metadata/part-00000          class, uid, Params, trial, columns: as Spark ML's JSON, sealed
<path>/model/graph.json             calls of known operators, sealed
<path>/model/*.safetensors          weights and constants
```

A sealed file holds its own digest. The metadata holds the graph's, which holds the tensors'.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.errors import ConfigurationError, StoreError
from cerebro_hydra.ml.model import SparkModel
from cerebro_hydra.ml.prediction_kind import PredictionKind
from cerebro_hydra.ml.trained_network import ExportedNetwork
from cerebro_hydra.shards.digest import file_digest
from cerebro_hydra.shards.exported import EXPORTED_FILES, GRAPH_FILE, load_exported
from cerebro_hydra.shards.sealed import seal, unseal
from cerebro_hydra.spark import hadoop_files
from cerebro_hydra.spark.predictors import ExportedPredictor
from cerebro_hydra.tune.trial import Trial

FORMAT = 2
METADATA_FILE = "metadata/part-00000"
COLUMN_DTYPES = ("float32", "int64", "bool")


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
        sealed.write_text(seal(json.loads(metadata), FORMAT) + "\n", encoding="ascii")
        for name in EXPORTED_FILES:
            hadoop_files.upload(self.sc, str(Path(self._folder, name)), f"{path}/model/{name}")
        hadoop_files.upload(self.sc, str(sealed), f"{path}/{METADATA_FILE}")


class ModelReader(MLReader[SparkModel]):
    """Loads a model where neither its source nor its run is known."""

    def load(self, path: str) -> SparkModel:
        """Load a saved model.

        Raises:
            ConfigurationError: another version wrote it, or it is something else.
            StoreError: a file is missing, or not as it was written.
        """
        with tempfile.TemporaryDirectory(prefix="cerebro-hydra-model-") as folder:
            sealed = Path(folder, "metadata")
            hadoop_files.download(self.sc, f"{path}/{METADATA_FILE}", str(sealed))
            metadata = unseal(sealed.read_bytes(), path, FORMAT)
            for name in EXPORTED_FILES:
                hadoop_files.download(self.sc, f"{path}/model/{name}", str(Path(folder, name)))
            if file_digest(Path(folder, GRAPH_FILE)) != metadata.get("graph"):
                raise StoreError(
                    f"{GRAPH_FILE} in {path!r} is not the one that was saved with its metadata, or "
                    "was damaged; save the model again"
                )
            load_exported(folder)  # here, so that no executor is the first to meet a damaged file
            predictor = ExportedPredictor.of(folder)
        try:
            model = _model(metadata, predictor)
            model._resetUid(metadata["uid"])
            DefaultParamsReader.getAndSetParams(model, metadata)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"the metadata of {path!r} are not those of a SparkModel "
                f"({type(error).__name__}: {error}); do not load it"
            ) from error
        return model


def _model(metadata: Mapping[str, Any], predictor: ExportedPredictor) -> SparkModel:
    specs = [
        ColumnSpec(
            str(each["name"]),
            COLUMN_DTYPES[COLUMN_DTYPES.index(each["dtype"])],
            tuple(int(size) for size in each["shape"]),
        )
        for each in metadata["columns"]
    ]
    kind = PredictionKind(metadata["head"])
    network = ExportedNetwork(predictor, specs, int(metadata["batch_size"]), kind)
    trial = {**metadata["trial"]}
    trial["visit_log"] = [(epoch, partition) for epoch, partition in trial["visit_log"]]
    return SparkModel(network, Trial(**trial), str(metadata["run_path"]))
