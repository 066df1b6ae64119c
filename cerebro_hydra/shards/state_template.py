"""A state template says which optimizer tensors each parameter will get, before it has any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError

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

        A trainable parameter that got no gradient is given the form of another one's state.

        Raises:
            ConfigurationError: the optimizer's state has a value that is no tensor and not None.
        """
        names = {id(p): name for name, p in model.named_parameters()}
        entries: dict[str, tuple[StateEntry, ...]] = {}
        example: tuple[Tensor, tuple[StateEntry, ...]] | None = None
        for parameter, state in optimizer.state.items():
            if not parameter.requires_grad:
                continue  # Adagrad makes state for frozen parameters too
            name = names[id(parameter)]
            entries[name] = tuple(
                _entry(optimizer, name, key, value)
                for key, value in state.items()
                if value is not None
            )
            example = example or (parameter, entries[name])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                if parameter.requires_grad and name not in entries and example is not None:
                    like, found = example
                    entries[name] = tuple(
                        (
                            key,
                            dtype,
                            tuple(parameter.shape) if shape == tuple(like.shape) else shape,
                        )
                        for key, dtype, shape in found
                    )
        return cls({name: entries[name] for name in names.values() if entries.get(name)})


def _entry(optimizer: torch.optim.Optimizer, name: str, key: Any, value: Any) -> StateEntry:
    if not isinstance(value, Tensor) or not isinstance(key, str):
        raise ConfigurationError(
            f"optimizer {type(optimizer).__name__} keeps {key!r} of parameter {name!r} as a "
            f"{type(value).__name__}; only tensors can hop, so choose another optimizer"
        )
    return key, value.dtype, tuple(value.shape)
