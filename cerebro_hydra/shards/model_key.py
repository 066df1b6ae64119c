"""Makes keys of models: equal structure means the same code, attributes and tensor forms."""

from __future__ import annotations

import types
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.shards.sample import Sample

_ATOMS = (int, float, complex, str, bytes, bool, type(None), type(...))
_BY_IDENTITY = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_NOT_STRUCTURE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class _Unknown(Exception):
    """A value can't be compared with others."""


def model_key(model: nn.Module, sample: Sample) -> Hashable | None:
    """Return a key that is equal for models with equal exported graphs, or None if unknown.

    The key does not depend on the values of parameters and persistent buffers, nor on the number
    of rows.
    """
    try:
        seen: dict[int, int] = {}
        modules = tuple(
            (name, _module(module, seen))
            for name, module in model.named_modules(remove_duplicate=False)
        )
    except (_Unknown, RecursionError):
        return None
    forms = tuple(
        (x.dtype, x.dim() if sample.dynamic_shapes else tuple(x.shape[1:])) for x in sample.inputs
    )
    return modules, forms, sample.call, sample.autocast, sample.dynamic_shapes


def _module(module: nn.Module, seen: dict[int, int]) -> Hashable:
    if id(module) in seen:
        return ("again", seen[id(module)])
    seen[id(module)] = len(seen)
    persistent = set(module._buffers) - module._non_persistent_buffers_set
    return (
        type(module),
        tuple((n, _form(p, seen)) for n, p in module._parameters.items()),
        tuple(
            (n, _form(b, seen) if n in persistent or b is None else _content(b))
            for n, b in module._buffers.items()
        ),
        tuple(sorted(persistent)),
        tuple(
            (name, _value(value, seen))
            for name, value in sorted(vars(module).items())
            if name not in _NOT_STRUCTURE
        ),
    )


def _form(tensor: Tensor | None, seen: dict[int, int]) -> Hashable:
    if tensor is None:
        return None
    tied = seen.setdefault(id(tensor), len(seen))
    form = (type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
    return (*form, tensor.requires_grad, tied)


def _content(tensor: Tensor) -> Hashable:
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor_digest(tensor))


def _value(value: Any, seen: dict[int, int]) -> Hashable:
    if type(value) in _ATOMS:
        return (type(value), repr(value) if isinstance(value, float) else value)
    if isinstance(value, _BY_IDENTITY):
        return value
    if type(value) in (list, tuple):
        return (type(value), tuple(_value(v, seen) for v in value))
    if isinstance(value, dict):
        pairs = tuple((_value(k, seen), _value(v, seen)) for k, v in value.items())
        return (type(value), pairs)
    if type(value) in (set, frozenset):
        return (type(value), frozenset(_value(v, seen) for v in value))
    if isinstance(value, nn.Module):
        return _module(value, seen)
    if isinstance(value, nn.Parameter):
        return _form(value, seen)
    if isinstance(value, weakref.ref):
        return _value(value(), seen)
    if type(value) is Tensor:
        return _content(value)
    if _is_plain(type(value)):
        if id(value) in seen:
            return ("again", seen[id(value)])
        seen[id(value)] = len(seen)
        return (type(value), _value(vars(value), seen))
    raise _Unknown


def _is_plain(cls: type) -> bool:
    """Return whether the instances of a class hold everything in their `__dict__`."""
    heap = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by a class statement
    ancestors = [c for c in cls.__mro__ if c is not object]
    return cls.__dictoffset__ != 0 and all(
        c.__flags__ & heap and "__slots__" not in vars(c) for c in ancestors
    )
