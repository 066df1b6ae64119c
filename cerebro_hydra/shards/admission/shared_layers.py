"""Refuses models of several trials that share layers where these trials take turns, or set them."""

from __future__ import annotations

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.admission.effects.value_texts import PLAIN

_REMEDY = (
    "let estimator_gen_fn build each module that it puts into a model, or put a copy.deepcopy of "
    "it there"
)


class SharedLayers:
    """Knows which trial has which parameters and modules, as long as those live.

    Args:
        by_turns: whether devices compute for several trials by turns within a step.
    """

    def __init__(self, by_turns: bool) -> None:
        self._by_turns = by_turns
        self._trials = WeakIdKeyDictionary()

    def check(self, trial_id: str, model: nn.Module) -> None:
        """Take in a trial's model.

        Raises:
            ConfigurationError: another trial's model has one of them, too, and trials take turns or
                their factories set something else there.
        """
        layers: dict[str, nn.Module | nn.Parameter] = {
            f"parameter {name!r}": each for name, each in model.named_parameters()
        }
        layers |= {f"module {name!r}": each for name, each in model.named_modules()}
        for told, layer in layers.items():
            other, settings = self._trials.get(layer, (trial_id, {}))
            if other == trial_id:
                continue
            said = f"{told} is the very one that the model of {other} has"
            if self._by_turns:
                raise ConfigurationError(
                    f"{said}, and devices compute for several trials by turns; {_REMEDY}"
                )
            for name, value in _settings_of(layer).items():
                if (its := settings.get(name)) != value:
                    raise ConfigurationError(
                        f"{said}, where {name} is {its}, and here {value}; {_REMEDY}"
                    )
        for layer in layers.values():
            self._trials[layer] = trial_id, _settings_of(layer)


def _settings_of(layer: nn.Module | nn.Parameter) -> dict[str, object]:
    """Return the numbers and texts of a module, or whether a parameter is trained."""
    if isinstance(layer, nn.Parameter):
        return {"requires_grad": layer.requires_grad}
    named = ((name, value) for name, value in vars(layer).items() if not name.startswith("_"))
    return {name: each for name, each in named if type(each) in PLAIN and name != "training"}
