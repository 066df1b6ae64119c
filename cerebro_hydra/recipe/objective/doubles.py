"""Lets torch compute in double precision what is written to be computed in single precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_any, tree_map, tree_map_only


class Doubles(TorchFunctionMode):
    """Makes a tensor of 64 bits wherever one of 32 would come up, in this thread and its block.

    The default type of torch would reach all threads, and leaves `Tensor.float` as it is.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        given = tree_map(_wide, (tuple(args), kwargs or {}))
        found = func(*given[0], **given[1])
        if not tree_any(_is_single, found):
            return found
        if func in _device_constructors():  # these take a type, too
            return func(*given[0], **{**given[1], "dtype": torch.float64})
        given = tree_map_only(Tensor, _as_fractions, given)  # as of a division of whole numbers
        return tree_map(_wide, func(*given[0], **given[1]))


def _is_single(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float32


def _wide(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value.double() if _is_single(value) else value


def _as_fractions(value: Tensor) -> Tensor:
    return value if value.is_floating_point() or value.is_complex() else value.double()
