"""Saves and loads a model of Spark ML; its files are those of `shards/model_archive.py`."""

from __future__ import annotations

import json

from pyspark.ml.util import DefaultParamsWriter, MLReader, MLWriter

from cerebro_hydra.documents import part_of
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.metadata import StageMetadata
from cerebro_hydra.ml.model import SparkModel
from cerebro_hydra.ml.trained_network import ExportedNetwork
from cerebro_hydra.shards.model_archive import ModelArchive
from cerebro_hydra.spark import hadoop_files
from cerebro_hydra.tune.saved_model import SavedModel


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
        self._archive = self._model.network.archive()
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
        saved = SavedModel(archive, path)
        return stage.restore(SparkModel(ExportedNetwork(saved), saved.trial, saved.run_path), where)
