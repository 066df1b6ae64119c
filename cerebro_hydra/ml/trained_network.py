"""The network of a fitted model: in the folder of its run, or in files that need no source code."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from cerebro_hydra.shards.model_archive import ModelArchive
from cerebro_hydra.spark.transform import Inference
from cerebro_hydra.tune.prediction_kind import PredictionKind
from cerebro_hydra.tune.saved_model import SavedModel

if TYPE_CHECKING:
    from torch import nn

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

    def archive(self) -> ModelArchive:
        """Return what a saved model consists of.

        Raises:
            ConfigurationError: the network can't do without its source; the message says why.
        """
        return self._trained.archive()


class ExportedNetwork:
    """Holds the network of a saved model."""

    def __init__(self, saved: SavedModel) -> None:
        self._saved = saved
        self._kind = saved.kind

    @property
    def inference(self) -> Inference:
        """Return what predicts on executors."""
        return self._saved.inference

    def torch(self) -> nn.Module:
        """Return the exported graph."""
        return self._saved.torch()

    def kind(self, output: str | None) -> PredictionKind:
        """Return what `output` asks for; if it is None, what the model was saved with."""
        # The loss is not saved, so what it said of classes is kept.
        if output is None or (output == "classification" and self._kind.has_classes):
            return self._kind
        return PredictionKind.choose(output, None, _shapes(self.inference))

    def archive(self) -> ModelArchive:
        """Return what it was loaded from."""
        return self._saved.archive


TrainedNetwork = RunNetwork | ExportedNetwork


def _shapes(inference: Inference) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in inference.sample]
