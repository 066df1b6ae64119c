"""Lets torch compute in double precision what is written to be computed in single precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map


class Doubles(TorchFunctionMode):
    """Makes a tensor of 64 bits wherever one of 32 would come up, in this thread and its block.

    One of 32 bits that is there is written to as it is, and so are views of it. The default type of
    torch would reach all threads, and leaves `Tensor.float` as it is.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        given, named = _of_doubles(args), {n: _of_doubles(v) for n, v in (kwargs or {}).items()}
        try:
            found = func(*given, **named)
        except RuntimeError:  # such as of a product of 32 bits and 64
            if func.__name__.endswith("_"):  # it would write to a copy
                raise
            given, named = tree_map(widened, (given, named))
            return func(*given, **named)
        if not _has_single(found) or _is_of(found, (given, named)):
            return found
        if func in _device_constructors():  # these take a type, too
            return func(*given, **{**named, "dtype": torch.float64})
        for wider in (widened, _as_fraction):  # the second for a quotient of integers
            given, named = tree_map(wider, (given, named))
            if not _has_single(found := func(*given, **named)):
                return found
        return tree_map(widened, found)


def widened(value: Any) -> Any:
    """Return a tensor of 64 bits in place of one of 32; anything else is itself."""
    is_single = isinstance(value, Tensor) and value.dtype is torch.float32
    return value.double() if is_single else value


# Called for each operation, so without `tree_map`, which takes longer than most of them.
def _of_doubles(value: Any) -> Any:
    if type(value) is tuple or type(value) is list:
        return type(value)(map(_of_doubles, value))
    return torch.float64 if value is torch.float32 else value


def _has_single(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype is torch.float32
    return isinstance(value, tuple | list) and any(map(_has_single, value))


def _is_of(found: Any, given: Any) -> bool:
    """Return whether a result is an argument, or a view of one, to which code may write."""
    return not _memory_of(found).isdisjoint(_memory_of(given))


def _memory_of(values: Any) -> set[int]:
    dense = (t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided)
    return {t.untyped_storage().data_ptr() for t in dense} - {0}


def _as_fraction(value: Any) -> Any:
    is_integer = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
    return value.double() if is_integer else value
