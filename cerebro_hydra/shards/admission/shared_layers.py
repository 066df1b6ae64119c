"""Refuses models of several trials that share layers where these trials take turns."""

from __future__ import annotations

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from cerebro_hydra.errors import ConfigurationError


class SharedLayers:
    """Knows which trial has which parameters and modules, as long as those live."""

    def __init__(self) -> None:
        self._trials = WeakIdKeyDictionary()

    def check(self, trial_id: str, model: nn.Module) -> None:
        """Take in a trial's model.

        Raises:
            ConfigurationError: another trial's model has one of them, too.
        """
        layers = {f"parameter {name!r}": each for name, each in model.named_parameters()} | {
            f"module {name!r}": each for name, each in model.named_modules()
        }
        for told, layer in layers.items():
            if (other := self._trials.get(layer, trial_id)) != trial_id:
                raise ConfigurationError(
                    f"{told} is the very one that the model of {other} has, and devices compute "
                    "for several trials by turns; let estimator_gen_fn build each module that it "
                    "puts into a model, or put a copy.deepcopy of it there"
                )
        for layer in layers.values():
            self._trials[layer] = trial_id
