"""A trained model gives its history, weights and predictions, and is saved and exported."""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cerebro_hydra.data.given_rows import feature_tensors
from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe.objective.prediction_kind import PredictionKind
from cerebro_hydra.shards.export.archive import ModelArchive
from cerebro_hydra.shards.export.formats import write_onnx, write_torch
from cerebro_hydra.spark import hadoop_files
from cerebro_hydra.spark.outputs import RawOutputs
from cerebro_hydra.spark.transform import Inference
from cerebro_hydra.storage.local_paths import local_path, only_local
from cerebro_hydra.storage.store import explained
from cerebro_hydra.tune.trial import History, Trial
from cerebro_hydra.tune.weights import ArchiveWeights, Weights

if TYPE_CHECKING:
    from torch import nn


class TrainedModel:
    """The model of one trial, whether it is taken from its run or was saved.

    Weights are read when they are asked for.

    Attributes:
        trial: the trial that it comes from, with its parameters, history and visit log.
        run_path: the folder of the run, which `cerebro_hydra.replay` takes while it exists.
    """

    def __init__(self, weights: Weights) -> None:
        """Use `SearchResult.get_best_model`, `get_model`, or `cerebro_hydra.load_model`."""
        self._weights = weights
        self.trial: Trial = weights.trial
        self.run_path: str = weights.run_path
        self._output_columns = output_names(weights.label_columns)
        self._told = False  # that more outputs were left out

    def __repr__(self) -> str:
        return f"TrainedModel({self.trial_id!r}, {self.params})"

    @property
    def trial_id(self) -> str:
        """Return the id of the trial, such as "trial-000"."""
        return self.trial.trial_id

    @property
    def params(self) -> dict[str, Any]:
        """Return the parameters that the factory was called with."""
        return dict(self.trial.params)

    @property
    def history(self) -> History:
        """Return measured values by name, one per epoch."""
        return self.trial.history

    @property
    def feature_columns(self) -> list[str]:
        """Return the names of the columns that the model takes, in its order."""
        return list(self._weights.feature_columns)

    def torch(self) -> nn.Module:
        """Return the model with its trained weights, in eval mode.

        It is what the factory builds. Of a saved model, and where a run's factory is unknown, it is
        a graph of known operators, which can't be trained: it takes every feature column, rows
        first, and gives the tuple of predictions.

        Raises:
            ConfigurationError: the factory is known only by the name that the run records, and the
                run has no archive.
            ReplayError: its factory can't be found; says how to give it.
            StoreError: a file of its weights is missing or damaged.
        """
        return self._weights.torch()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained parameters and buffers by their names, in the model's order.

        No source is needed. Without it and without an archive, as of a run's other models than the
        best, they come in the order of the shards, tied ones once, and buffers that are no part of
        a state dict among them.

        Raises:
            StoreError: a file of its weights is missing or damaged.
        """
        return self._weights.state_dict()

    def predict(
        self, rows: Any, batch_size: int | None = None
    ) -> NDArray[Any] | tuple[NDArray[Any], ...]:
        """Return what the model gives for rows at hand, computed here on the CPU, without Spark.

        Args:
            rows: a pandas DataFrame; a dict of arrays, tensors or lists by feature column, rows
                first; a list of dicts, one per row; or the array or tensor of the only feature
                column, of shape (rows, *shape of a row). Other columns are left out. What `collate`
                does in evaluation is done to them.
            batch_size: rows per forward pass; None takes the trial's.

        Returns:
            An array of shape (rows, ...) as the model gives it, so logits stay logits; the tuple of
            arrays if it gives several. bfloat16 becomes float32.

        Raises:
            DataError: a column is missing, or has another type or shape than in training.
            ConfigurationError: batch_size is no whole number from 1; or as `torch` raises.
            ReplayError, StoreError: as `transform` raises.
        """
        if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
            raise ConfigurationError(f"batch_size is {batch_size!r}; it is a whole number from 1")
        inference = self._weights.inference
        predictions = inference.predict(feature_tensors(rows, inference.specs), batch_size)
        arrays = tuple(_array(tensor) for tensor in predictions)
        return arrays[0] if len(arrays) == 1 else arrays

    def set_output_columns(self, output_columns: Sequence[str]) -> TrainedModel:
        """Name the columns that `transform` adds, one per label column at least; returns itself.

        They hold the first tensors that forward gives, in its order.

        Raises:
            ConfigurationError: they are fewer than the label columns.
        """
        self._output_columns = checked_outputs(output_columns, self._weights.label_columns)
        return self

    def transform(self, df: Any) -> Any:
        """Add the model's outputs to a DataFrame, by default in `<label>__output`, else `output`.

        Where forward gives more tensors than there are output columns, as a student with its
        features does, the first ones are taken. A warning says so once.

        A table of pandas or polars is predicted in this process, and comes back as such a table,
        with its index; a path is read by Spark.

        Raises:
            ConfigurationError: an output column is there already, or the factory is known only by
                the name that the run records.
            DataError: a feature column is missing, or has another type than in training.
            ReplayError: the factory can't be found; says how to give it.
            StoreError: the prepared data is gone, whose manifest says what the columns hold.
        """
        inference, names = self._weights.inference, tuple(self._output_columns)
        if not self._told and (left := len(inference.sample) - len(names)) > 0:
            self._told = True
            warnings.warn(
                f"forward gives {len(inference.sample)} tensors, and transform takes the first "
                f"{len(names)}, as {list(names)}; name the other {left} too with "
                "set_output_columns([...]) to have them",
                stacklevel=2,
            )
        return inference.transform(df, RawOutputs(names))

    def save(self, path: str, overwrite: bool = False) -> None:
        """Save the model so that it loads without its source and its run, and without pickle.

        `cerebro_hydra.load_model(path)` and `SparkModel.load(path)` load it. What `collate` does in
        evaluation becomes a part of it.

        Args:
            path: a folder on this machine, whose parents are made; or a URL of any file system that
                Spark knows, for which a Spark session must be active.
            overwrite: whether to replace what is there.

        Raises:
            ConfigurationError: `path` exists, or the model can't do without its source; says why.
            ReplayError: its factory can't be found; says how to give it.
            StoreError: it can't be written, or the prepared data is gone.
        """
        write_archive(self.archive(), path, overwrite)

    def export(self, path: str, format: str = "torch") -> None:
        """Write the model to a file that other programs load, without its source and without us.

        It takes the feature columns, with any number of rows, as training had them: what `collate`
        does in evaluation is a part of it. It is compared with torch's own predictions before the
        file is there, on three numbers of rows: rows of its training, or zeros and random numbers
        where its run is not at hand.

        Args:
            path: a file on this machine, whose parents are made; a file there is replaced.
            format: "torch" writes an archive of `torch.export` (.pt2), which gives equal bits and
                takes the columns by position; "onnx" writes an ONNX model, within 1e-4 of the
                largest prediction, whose inputs are named as the feature columns and whose outputs
                are those of `transform`. It needs `cerebro-hydra[onnx]`.

        Raises:
            ConfigurationError: there is no such format, or the model can't be written in it.
            SetupError: a package is missing.
            ReplayError, StoreError: as `save` raises.
        """
        if format not in ("torch", "onnx"):
            raise ConfigurationError(f"format is {format!r}; choose 'torch' or 'onnx'")
        file = Path(only_local("path", path))
        model, rows = self.archive().module(), self._weights.rows()
        with explained("write", path):
            if format == "torch":
                write_torch(model, rows, file)
            else:
                outputs = self._outputs(len(model(*rows)))
                write_onnx(model, rows, file, self.feature_columns, outputs)

    def _outputs(self, count: int) -> list[str]:
        """Return a name for each prediction."""
        if count == len(self._output_columns):
            return self._output_columns
        return [f"output_{number}" for number in range(count)]

    def archive(self) -> ModelArchive:
        """Return what `save` writes; raises as it does."""
        return self._weights.archive()

    @property
    def inference(self) -> Inference:
        """Return what predicts on executors; raises as `transform` does."""
        return self._weights.inference

    def kind(self, output: str | None = None) -> PredictionKind:
        """Return what its predictions are: what `output` asks for; if it is None, as its loss says.

        Raises:
            ConfigurationError: its predictions can't be what `output` asks for.
        """
        return self._weights.kind(output)


def _array(prediction: Tensor) -> NDArray[Any]:
    if prediction.dtype == torch.bfloat16:  # which numpy does not know
        prediction = prediction.float()
    return np.asarray(prediction.numpy())


def load_model(path: str) -> TrainedModel:
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
    return TrainedModel(ArchiveWeights(read_archive(str(path)), str(path)))


def read_archive(path: str) -> ModelArchive:
    """Read a saved model; raises as `load_model`."""
    if (folder := local_path("path", path)) is None:
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
    if (folder := local_path("path", path)) is None:
        context = hadoop_files.active_context(path)
        hadoop_files.write_folder(context, path.rstrip("/"), archive.files(), overwrite)
        return
    if not overwrite and os.path.lexists(folder):
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
            if os.path.isdir(folder) and not os.path.islink(folder):
                shutil.rmtree(folder)
            elif os.path.lexists(folder):
                os.unlink(folder)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def output_names(labels: Sequence[str]) -> list[str]:
    """Return how output columns are called by default; without labels there is one."""
    return [f"{name}__output" for name in labels] or ["output"]


def checked_outputs(output_columns: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return the names of output columns, one per label column at least; others may follow.

    Raises:
        ConfigurationError: they are fewer.
    """
    given = 0 if isinstance(output_columns, str) else len(output_columns)
    if not given or given < len(labels):
        per_label = f"{len(labels)} names, one for each of {list(labels)}, or more"
        per_tensor = "names, one for each tensor that forward gives"
        raise ConfigurationError(
            f"output_columns is {output_columns!r}; give a list of "
            f"{per_label if labels else per_tensor}"
        )
    return list(output_columns)
