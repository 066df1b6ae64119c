"""Lets torch compute in double precision what is written to be computed in single precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map, tree_map_only


class Doubles(TorchFunctionMode):
    """Makes a tensor of 64 bits wherever one of 32 would come up, in this thread and its block.

    The default type of torch would reach all threads, and leaves `Tensor.float` as it is.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        given, named = _wide(args), {name: _wide(each) for name, each in (kwargs or {}).items()}
        found = func(*given, **named)
        if not _has_single(found):
            return found
        if func in _device_constructors():  # these take a type, too
            return func(*given, **{**named, "dtype": torch.float64})
        given, named = tree_map_only(Tensor, _as_fraction, (given, named))  # a division, for one
        return tree_map(_wide, func(*given, **named))


# Called for each operation, so without `tree_map`, which takes longer than most of them.
def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.dtype is torch.float32 else value
    if type(value) is tuple or type(value) is list:
        return type(value)(map(_wide, value))
    return torch.float64 if value is torch.float32 else value


def _has_single(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype is torch.float32
    return isinstance(value, tuple | list) and any(map(_has_single, value))


def _as_fraction(value: Tensor) -> Tensor:
    return value if value.is_floating_point() or value.is_complex() else value.double()
