"""Defines predictors: trained models in a form that travels to executors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe, build_keeping_random_state
from cerebro_hydra.shards.exported import EXPORTED_FILES, load_exported

Predict = Callable[[tuple[Tensor, ...]], list[Tensor]]
"""Turns features into predictions, both on the predictor's device, rows first."""


class Predictor(Protocol):
    """Holds a trained model in a form that travels: bytes and plain values."""

    def load(self, device: torch.device) -> Predict:
        """Build the model on a device; the process's random numbers go on as before.

        Raises:
            ConfigurationError: its weights don't fit.
        """
        ...


@dataclass(frozen=True)
class BuiltPredictor:
    """Builds a model with a factory.

    Args:
        factory: the `estimator_gen_fn`, as `pickle_factory` gives it.
        params: the factory's argument.
        seed: the search's seed.
        columns: the columns of training; `forward` takes the features among them.
        state: safetensors files that together hold the model's `state_dict`, tied tensors once or
            more.
    """

    factory: bytes
    params: Mapping[str, Any]
    seed: int
    columns: Columns
    state: Mapping[str, bytes]

    def load(self, device: torch.device) -> Predict:
        """Run the factory and put the weights into its model."""
        from pyspark.serializers import CloudPickleSerializer

        def factory(params: Any) -> Any:  # what it imports may draw random numbers, too
            return CloudPickleSerializer().loads(self.factory)(params)

        recipe = build_keeping_random_state(factory, self.params, self.seed, self.columns)
        load_state(recipe.model, self.state.values())
        recipe.to(device).model.eval()
        return partial(_predict, recipe)


@dataclass(frozen=True)
class ExportedPredictor:
    """Holds the files of `save_exported`, by name, which hold a model without its source."""

    files: Mapping[str, bytes]

    @classmethod
    def of(cls, folder: str | Path) -> ExportedPredictor:
        """Read what `save_exported` wrote to a folder."""
        return cls({name: Path(folder, name).read_bytes() for name in EXPORTED_FILES})

    def write(self, folder: str | Path) -> None:
        """Write the files to a folder."""
        for name, content in self.files.items():
            Path(folder, name).write_bytes(content)

    def module(self, device: torch.device) -> nn.Module:
        """Return the model; its forward takes every feature and gives the tuple of predictions.

        Raises:
            ConfigurationError: the files hold what `save_exported` never writes.
            StoreError: a file is not as it was written.
        """
        with tempfile.TemporaryDirectory(prefix="cerebro-hydra-model-") as folder:
            self.write(folder)
            return load_exported(folder, device)

    def load(self, device: torch.device) -> Predict:
        """Load graph and weights."""
        model = self.module(device)
        return lambda features: list(model(*features))


def _predict(recipe: Recipe, features: tuple[Tensor, ...]) -> list[Tensor]:
    features, _ = recipe.collated(features, (), None)
    with torch.no_grad(), recipe.precision():
        return recipe.predictions(recipe.call(recipe.model, features))


def load_state(model: nn.Module, files: Iterable[bytes]) -> None:
    """Copy the tensors of safetensors files into a model, and require that none is left out.

    Raises:
        ConfigurationError: names are missing or unknown, or a shape differs.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(safetensors.torch.load(bytes(file)))
    own = model.state_dict(keep_vars=True)
    unknown = sorted(set(tensors) - set(own))
    covered = {id(own[name]) for name in tensors if name in own}
    missing = sorted(name for name, tensor in own.items() if id(tensor) not in covered)
    if unknown or missing:
        raise ConfigurationError(
            f"the saved weights are not this model's: missing {missing}, unknown {unknown}; give "
            "the factory and params that they were trained with"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            if own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
                raise ConfigurationError(
                    f"saved {name} is {tensor.dtype} {tuple(tensor.shape)} and the model's is "
                    f"{own[name].dtype} {tuple(own[name].shape)}; give the factory and params "
                    "that it was trained with"
                )
            own[name].copy_(tensor)
