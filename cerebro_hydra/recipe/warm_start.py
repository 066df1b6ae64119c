"""Begins a trial with weights that were trained before."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError


def load_warm_start(model: nn.Module, given: Mapping[str, Tensor] | str) -> None:
    """Copy a state dict into a model; its names and shapes must be the model's own.

    Args:
        given: the state dict, or the path of a safetensors file. Tied tensors may come once.

    Raises:
        ConfigurationError: the file can't be read, or a name or shape differs.
    """
    state = given if isinstance(given, Mapping) else _read(given)
    own = model.state_dict(keep_vars=True)
    covered = {id(own[name]) for name in state if name in own}
    missing = [name for name, tensor in own.items() if id(tensor) not in covered]
    unknown = [name for name in state if name not in own]
    if missing or unknown:
        raise ConfigurationError(
            f"warm_start is no state dict of this model: missing {missing[:10]}, unknown "
            f"{unknown[:10]}; add or leave out such entries in the factory"
        )
    with torch.no_grad():
        for name, tensor in state.items():
            _check_kind(name, tensor, own[name])
            if own[name].shape != tensor.shape:
                raise ConfigurationError(
                    f"warm_start has {name} of shape {tuple(tensor.shape)}, the model's is "
                    f"{tuple(own[name].shape)}"
                )
            own[name].copy_(tensor)


def _check_kind(name: str, given: Any, own: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise ConfigurationError(
            f"warm_start has a {type(given).__name__} for {name}; give tensors, as in a state_dict"
        )
    if given.is_floating_point() != own.is_floating_point():
        raise ConfigurationError(
            f"warm_start has {name} as {given.dtype}, the model's is {own.dtype}; numbers would be "
            "lost or made up: give that type"
        )


class _MappedFile(Mapping[str, Tensor]):
    """Reads each tensor of a safetensors file when it is asked for, from mapped memory."""

    def __init__(self, path: str) -> None:
        self._file = safetensors.safe_open(path, "pt")
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _read(path: str) -> Mapping[str, Tensor]:
    if not os.path.isfile(path):
        raise ConfigurationError(
            f"warm_start is {path!r}, and there is no such file; give the path of a safetensors "
            "file, or a state dict"
        )
    try:
        return _MappedFile(path)
    except safetensors.SafetensorError as error:
        raise ConfigurationError(
            f"warm_start is {path!r}, which is no safetensors file ({error}); write one with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        ) from error
