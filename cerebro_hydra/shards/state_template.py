"""A state template says which optimizer tensors each parameter will get, before it has any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.optimizer_clone import clone_optimizer

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

StateEntry = tuple[str, torch.dtype, tuple[int, ...]]  # key, dtype, shape


@dataclass(frozen=True)
class StateTemplate:
    """Describes the form of each parameter's optimizer state, by parameter name."""

    entries: dict[str, tuple[StateEntry, ...]]

    def of(self, name: str) -> tuple[StateEntry, ...]:
        """Return the entries of a parameter, none if the optimizer keeps no state for it."""
        return self.entries.get(name, ())

    def to_json(self) -> dict[str, Any]:
        return {
            name: [[key, str(dtype).removeprefix("torch."), list(shape)] for key, dtype, shape in e]
            for name, e in self.entries.items()
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StateTemplate:
        return cls(
            {
                name: tuple((key, _DTYPES[dtype], tuple(shape)) for key, dtype, shape in e)
                for name, e in document.items()
            }
        )

    @classmethod
    def learn(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> StateTemplate:
        """Learn the template from an optimizer that has stepped.

        For a trainable parameter without a gradient so far, a copy of the optimizer takes a step.

        Raises:
            ConfigurationError: the optimizer's state has a value that is no tensor and not None.
        """
        names = {id(p): name for name, p in model.named_parameters()}
        entries: dict[str, tuple[StateEntry, ...]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue  # Adagrad makes state for frozen parameters too
                name = names[id(parameter)]
                state = optimizer.state.get(parameter) or _state_after_a_step(optimizer, parameter)
                entries[name] = tuple(
                    _entry(optimizer, name, key, value)
                    for key, value in state.items()
                    if value is not None
                )
        return cls({name: entries[name] for name in names.values() if entries.get(name)})


def _state_after_a_step(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the state that an optimizer makes for a parameter with its first gradient."""
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    clone = clone_optimizer(optimizer, {id(parameter): stand_in})
    clone.step()
    return dict(clone.state[stand_in])


def _entry(optimizer: torch.optim.Optimizer, name: str, key: Any, value: Any) -> StateEntry:
    if not isinstance(value, Tensor) or not isinstance(key, str):
        raise ConfigurationError(
            f"optimizer {type(optimizer).__name__} keeps {key!r} of parameter {name!r} as a "
            f"{type(value).__name__}; only tensors can hop, so choose another optimizer"
        )
    return key, value.dtype, tuple(value.shape)
