"""The network of a fitted model: in the folder of its run, or in files that need no source code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.ml.prediction_kind import PredictionKind
from cerebro_hydra.shards.exported import save_exported
from cerebro_hydra.spark.predictors import ExportedPredictor
from cerebro_hydra.spark.transform import Inference

if TYPE_CHECKING:
    from cerebro_hydra.data.manifest import ColumnSpec
    from cerebro_hydra.tune.model import TrainedModel


class RunNetwork:
    """The network of a finished trial, with the weights that lie in the run's folder."""

    def __init__(self, trained: TrainedModel) -> None:
        self._trained = trained

    @property
    def inference(self) -> Inference:
        """Return what predicts on executors, with the weights as they were when first read."""
        return self._inference_and_loss[0]

    @cached_property
    def _inference_and_loss(self) -> tuple[Inference, Any]:
        recipe = self._trained.recipe()
        return self._trained.inference(recipe), recipe.loss

    def torch(self) -> nn.Module:
        """Return the module that the factory builds, with the trained weights."""
        return self._trained.torch()

    def kind(self, output: str | None) -> PredictionKind:
        """Return what `output` asks for; if it is None, what the loss says."""
        inference, loss = self._inference_and_loss
        return PredictionKind.choose(output, loss, _shapes(inference))

    def export(self, folder: str) -> None:
        """Write the files of `save_exported`, traced with rows that the network was trained on.

        Raises:
            ConfigurationError: the network can't do without its source; the message says why.
        """
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


class ExportedNetwork:
    """Holds the network of a saved model.

    Args:
        predictor: graph and weights.
        specs: type and shape of each feature column, in order.
        batch_size: of training.
        kind: what the predictions are where nothing else is asked for.
    """

    def __init__(
        self,
        predictor: ExportedPredictor,
        specs: Sequence[ColumnSpec],
        batch_size: int,
        kind: PredictionKind,
    ) -> None:
        self.inference = Inference(predictor, specs, batch_size)
        self._predictor = predictor
        self._kind = kind

    def torch(self) -> nn.Module:
        """Return the exported graph."""
        return self._predictor.module(torch.device("cpu"))

    def kind(self, output: str | None) -> PredictionKind:
        """Return what `output` asks for; if it is None, what the model was saved with."""
        # The loss is not saved, so what it said of classes is kept.
        if output is None or (output == "classification" and self._kind.has_classes):
            return self._kind
        return PredictionKind.choose(output, None, _shapes(self.inference))

    def export(self, folder: str) -> None:
        """Write the same files again."""
        self._predictor.write(folder)


TrainedNetwork = RunNetwork | ExportedNetwork


def _shapes(inference: Inference) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in inference.sample]
