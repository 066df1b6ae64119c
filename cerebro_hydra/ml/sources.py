"""Where a model's network comes from: a run that trained it, or files that need no source."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.heads import CLASS_HEADS, choose_head
from cerebro_hydra.shards.exported import GRAPH_FILE, WEIGHTS_FILE, save_exported
from cerebro_hydra.spark.predictors import ExportedPredictor
from cerebro_hydra.spark.transform import Inference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cerebro_hydra.data.manifest import ColumnSpec
    from cerebro_hydra.tune.model import TrainedModel


class ModelSource(Protocol):
    """A trained network; copies of a model share it, and with it what was sent to executors."""

    @property
    def inference(self) -> Inference:
        """What predicts on executors."""
        ...

    def torch(self) -> nn.Module:
        """The network, in eval mode."""
        ...

    def head(self, asked: str | None) -> str:
        """What its predictions are, where `asked` is the Param `output`."""
        ...

    def export(self, folder: str) -> None:
        """Write the files of `save_exported`.

        Raises:
            ConfigurationError: the network can't do without its source; says why.
        """
        ...


class Fitted:
    """A trial in a run's folder, whose factory this process knows."""

    def __init__(self, trained: TrainedModel) -> None:
        self._trained = trained

    @property
    def inference(self) -> Inference:
        """With the weights as the run's folder has them."""
        return self._read[0]

    @cached_property
    def _read(self) -> tuple[Inference, Any]:
        """What predicts, and the loss; the weights are read once."""
        recipe = self._trained.recipe()
        return self._trained.inference(recipe), recipe.loss

    def torch(self) -> nn.Module:
        """The module that the factory builds, with the trained weights."""
        return self._trained.torch()

    def head(self, asked: str | None) -> str:
        """By the loss, where nothing is asked for."""
        shapes = [tuple(tensor.shape) for tensor in self.inference.sample]
        return choose_head(asked, self._read[1], shapes)

    def export(self, folder: str) -> None:
        """Trace the network with rows that it was trained on."""
        recipe = self._trained.recipe()
        if recipe.collate is not None:
            raise ConfigurationError(
                f"{type(recipe.model).__name__} can't be saved without its source: its collate is "
                "a Python function; do in the model's forward, or in Spark, what it does"
            )
        features = self._trained.batch().features
        if len(features[0]) < 2:
            features = tuple(torch.cat([column, column]) for column in features)
        save_exported(recipe, features, folder)


class Loaded:
    """The files of a saved model.

    Args:
        program: graph and weights.
        specs: type and shape of each feature column, in order.
        batch_size: of training.
        loss_head: what the predictions are where nothing is asked for.
    """

    def __init__(
        self,
        program: ExportedPredictor,
        specs: Sequence[ColumnSpec],
        batch_size: int,
        loss_head: str,
    ) -> None:
        self.inference = Inference(program, specs, batch_size)
        self._program = program
        self._loss_head = loss_head

    def torch(self) -> nn.Module:
        """The exported graph."""
        return self._program.module(torch.device("cpu"))

    def head(self, asked: str | None) -> str:
        """As it was when it was saved, where nothing else is asked for."""
        if asked is None or (asked == "classification" and self._loss_head in CLASS_HEADS):
            return self._loss_head
        shapes = [tuple(tensor.shape) for tensor in self.inference.sample]
        return choose_head(asked, None, shapes)

    def export(self, folder: str) -> None:
        """Write the same files again."""
        Path(folder, GRAPH_FILE).write_bytes(self._program.graph)
        Path(folder, WEIGHTS_FILE).write_bytes(self._program.weights)
