"""Saves and loads trained models that need neither their source nor their run.

What a model's prediction is, and of which kind, is decided here.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cerebro_hydra.data.manifest import ColumnSpec
from cerebro_hydra.documents import Positive, one_of, part_of
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.objective.objective import CLASS_INDEX_LOSSES, is_likelihood, is_log_odds
from cerebro_hydra.shards.export.archive import ModelArchive
from cerebro_hydra.spark import hadoop_files
from cerebro_hydra.spark.outputs import RawOutputs
from cerebro_hydra.spark.transform import ExportedPredictor, Inference
from cerebro_hydra.storage.store import explained
from cerebro_hydra.tune.trial import History, Trial

if TYPE_CHECKING:
    from torch import nn


SPARK_CLASS = "cerebro_hydra.ml.model.SparkModel"
"""The stage of Spark ML that a saved model is when Spark loads it."""

_CLASS_INDEX_FUNCTIONS = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)


@dataclass(frozen=True)
class ModelFacts:
    """Holds what the metadata of a saved model say that Spark ML does not ask for."""

    head: Annotated[str, one_of(*PredictionKind)]
    columns: tuple[ColumnSpec, ...]
    """Type and shape of each feature column, in the order in which the model takes them."""
    label_columns: tuple[str, ...]
    batch_size: Positive
    trial: Trial
    run_path: str

    @classmethod
    def of(cls, archive: ModelArchive, where: str) -> ModelFacts:
        """Read them from an archive; StoreError if one is missing or of a wrong type."""
        facts: ModelFacts = part_of(cls, dict(archive.metadata), f"the metadata of {where!r}")
        return facts

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of an archive, as JSON, with what Spark ML asks for."""
        stage = {"class": SPARK_CLASS, "uid": f"SparkModel_{uuid.uuid4().hex[:12]}"}
        fields = {**stage, "paramMap": {}, "defaultParamMap": {}, **asdict(self)}
        document: dict[str, Any] = json.loads(json.dumps(fields))
        return document


class SavedModel:
    """A model that was saved, which stands alone.

    Attributes:
        archive: its files.
        trial: the trial that it comes from, with its parameters, history and visit log.
        run_path: the folder of the run, which `cerebro_hydra.replay` takes while it exists.
    """

    def __init__(self, archive: ModelArchive, where: str) -> None:
        """Use `cerebro_hydra.load_model`."""
        self.archive = archive
        self._facts = ModelFacts.of(archive, where)
        self.trial, self.run_path = self._facts.trial, self._facts.run_path
        self._output_columns = output_names(self._facts.label_columns)

    def __repr__(self) -> str:
        return f"SavedModel({self.trial.trial_id!r}, {self.trial.params})"

    @property
    def params(self) -> dict[str, Any]:
        """Return the parameters that the factory was called with."""
        return dict(self.trial.params)

    @property
    def kind(self) -> PredictionKind:
        """Return what its predictions are, as its loss told."""
        return PredictionKind(self._facts.head)

    @property
    def feature_columns(self) -> list[str]:
        """Return the names of the columns that the model takes, in its order."""
        return [spec.name for spec in self._facts.columns]

    def get_history(self) -> History:
        """Return measured values by name, one per epoch."""
        return self.trial.history

    def torch(self) -> nn.Module:
        """Return the model, in eval mode: a graph of known operators that can't be trained.

        It takes every feature column, rows first, and gives the tuple of predictions.
        """
        return self.archive.module()

    def set_output_columns(self, output_columns: Sequence[str]) -> SavedModel:
        """Name the columns that `transform` adds, one per label column; returns itself.

        A model that was trained without labels has one for each tensor that forward gives.

        Raises:
            ConfigurationError: they are not as many as label columns.
        """
        self._output_columns = checked_outputs(output_columns, self._facts.label_columns)
        return self

    def transform(self, df: Any) -> Any:
        """Add the model's outputs to a DataFrame, by default in `<label>__output`, else `output`.

        A table of pandas or polars is predicted in this process, and comes back as such a table,
        with its index; a path is read by Spark.

        Raises:
            ConfigurationError: an output column is there already.
            DataError: a feature column is missing, or has another type than in training.
        """
        return self.inference.transform(df, RawOutputs(tuple(self._output_columns)))

    def save(self, path: str, overwrite: bool = False) -> None:
        """Save the model again; see `TrainedModel.save`."""
        write_archive(self.archive, path, overwrite)

    @cached_property
    def inference(self) -> Inference:
        """Return what predicts on executors."""
        predictor = ExportedPredictor(self.archive.exported)
        return Inference(predictor, self._facts.columns, self._facts.batch_size)


def load_model(path: str) -> SavedModel:
    """Load a model that `save` wrote, where neither its source nor its run is known.

    Nothing of it is executed. What `SparkModel.save` wrote can be loaded, too.

    Args:
        path: the folder on this machine; or a URL of any file system that Spark knows, for which a
            Spark session must be active.

    Raises:
        ConfigurationError: another version wrote it, or it is something else.
        StoreError: a file is missing, or not as it was written.
        SetupError: the path is a URL, and there is no Spark session.
    """
    return SavedModel(read_archive(str(path)), str(path))


def read_archive(path: str) -> ModelArchive:
    """Read a saved model; raises as `load_model`."""
    if (folder := _on_this_machine(path)) is None:
        context = hadoop_files.active_context(path)
        return ModelArchive.read(lambda n: hadoop_files.read_file(context, f"{path}/{n}"), path)

    def read(name: str) -> bytes:
        with explained("read", f"{folder}/{name}"):
            return Path(folder, name).read_bytes()

    return ModelArchive.read(read, path)


def write_archive(archive: ModelArchive, path: str, overwrite: bool) -> None:
    """Write the files of a model to a folder that is there as a whole or not at all.

    Raises:
        ConfigurationError: `path` exists and may not be overwritten.
        StoreError: it can't be written.
        SetupError: the path is a URL, and there is no Spark session.
    """
    path = str(path).rstrip("/")
    if (folder := _on_this_machine(path)) is None:
        context = hadoop_files.active_context(path)
        hadoop_files.write_folder(context, path, archive.files(), overwrite)
        return
    if not overwrite and os.path.exists(folder):
        raise ConfigurationError(
            f"{path!r} exists; choose another path, or save(path, overwrite=True)"
        )
    with explained("write", path):
        unfinished = Path(f"{folder}.unfinished-{uuid.uuid4().hex[:8]}")
        try:
            for name, content in archive.files().items():
                file = unfinished / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            if os.path.exists(folder):
                shutil.rmtree(folder)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _on_this_machine(path: str) -> str | None:
    """Return the path of a folder of this machine; None for the URL of another file system."""
    path = path.removeprefix("file://")
    return None if "://" in path else os.path.abspath(path)


def output_names(labels: Sequence[str]) -> list[str]:
    """Return how output columns are called by default; without labels there is one."""
    return [f"{name}__output" for name in labels] or ["output"]


def checked_outputs(output_columns: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return the names of output columns, one per label column, or any number without labels.

    Raises:
        ConfigurationError: they are not as many.
    """
    given = 0 if isinstance(output_columns, str) else len(output_columns)
    if not given or (labels and given != len(labels)):
        per_label = f"{len(labels)} names, one for each of {list(labels)}"
        per_tensor = "names, one for each tensor that forward gives"
        raise ConfigurationError(
            f"output_columns is {output_columns!r}; give a list of "
            f"{per_label if labels else per_tensor}"
        )
    return list(output_columns)


class PredictionKind(StrEnum):
    """Names what a network gives for a row."""

    RAW = "raw"  # anything
    NUMBER = "number"  # one number
    SOFTMAX = "softmax"  # one score per class
    SIGMOID = "sigmoid"  # one score: of class 1 against class 0
    PROBABILITY = "probability"  # one number: how likely class 1 is

    @property
    def has_classes(self) -> bool:
        """Return whether the prediction is about classes."""
        return self not in (PredictionKind.RAW, PredictionKind.NUMBER)

    @classmethod
    def choose(
        cls, output: str | None, loss: Any, shapes: Sequence[tuple[int, ...]]
    ) -> PredictionKind:
        """Decide what a model's predictions are.

        Args:
            output: "classification", "regression" or "raw"; None takes what the loss says.
            loss: the recipe's, or None if it isn't known.
            shapes: of the predictions, rows first.

        Raises:
            ConfigurationError: predictions of these shapes can't be what was asked for.
        """
        if output == "raw":
            return cls.RAW
        single = len(shapes) == 1
        one_number = single and shapes[0][1:] in ((), (1,))
        scores = single and len(shapes[0]) == 2 and shapes[0][1] > 1
        if output == "regression":
            if not one_number:
                raise _misfit(output, "one number per row", shapes)
            return cls.NUMBER
        if output == "classification":
            if scores:
                return cls.SOFTMAX
            if not one_number:
                raise _misfit(output, "a score per class, or one number per row", shapes)
            return cls.PROBABILITY if is_likelihood(loss) else cls.SIGMOID
        if scores and (isinstance(loss, CLASS_INDEX_LOSSES) or loss in _CLASS_INDEX_FUNCTIONS):
            return cls.SOFTMAX
        if one_number and is_log_odds(loss):
            return cls.SIGMOID
        return cls.PROBABILITY if one_number and is_likelihood(loss) else cls.RAW

    def scores(self, predictions: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores and probabilities, each of shape (rows, classes); only for classes."""
        if self == PredictionKind.SOFTMAX:
            return predictions, predictions.softmax(1)
        one = predictions.reshape(-1)
        if self == PredictionKind.SIGMOID:
            return torch.stack([-one, one], 1), torch.stack([(-one).sigmoid(), one.sigmoid()], 1)
        both = torch.stack([1 - one, one], 1)
        return both, both


def _misfit(output: str, needed: str, shapes: Sequence[tuple[int, ...]]) -> ConfigurationError:
    found = [tuple(shape[1:]) for shape in shapes]
    return ConfigurationError(
        f"output is {output!r}, which needs {needed}, and forward gives {len(shapes)} tensors of "
        f"shape {found} per row; set output to None or 'raw'"
    )
