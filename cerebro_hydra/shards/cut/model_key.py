"""Makes keys of models: equal structure means the same code, attributes and tensor forms."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.shards.cut.sample import Sample
from cerebro_hydra.shards.digest import tensor_digest

_ATOMS = (int, float, complex, str, bytes, bool, type(None), type(...))
_BY_IDENTITY = (
    type, types.BuiltinFunctionType, types.ModuleType,
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
    structure = structure_key(model, constants=False)
    if structure is None:
        return None
    forms = tuple(
        (x.dtype, x.dim() if sample.dynamic_shapes else tuple(x.shape[1:])) for x in sample.inputs
    )
    run = sample.call, sample.autocast, sample.compiles, sample.dynamic_shapes, sample.settings
    return structure, forms, *run


def structure_key(value: Any, constants: bool) -> Hashable | None:
    """Return a key that is equal for values of equal structure, or None if that can't be told.

    A function that was made inside of another one counts by its code and what it closes over;
    every other function, and every class, is itself alone.

    Args:
        constants: whether parameters without gradient and persistent buffers of modules count by
            their content, and where tensors lie in memory. Else they count by their form, as
            trainable parameters always do.
    """
    try:
        return _Structure(constants).value(value)
    except (_Unknown, RuntimeError):  # RuntimeError: too deep, or a parameter without a shape
        return None


class _Same:
    """Equals whatever holds the same object."""

    def __init__(self, held: object) -> None:
        self._held = held

    def __hash__(self) -> int:
        return id(self._held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._held is other._held


class _Structure:
    """Walks through values; what it meets again counts by the number of its first meeting."""

    def __init__(self, constants: bool) -> None:
        self._constants = constants
        self._seen: dict[int, int] = {}
        self._memory: dict[int, int] = {}

    def value(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _ATOMS:
            return (kind, repr(value) if isinstance(value, float | complex) else value)
        if isinstance(value, _BY_IDENTITY):
            return value
        if kind in (list, tuple):
            return (kind, tuple(self.value(v) for v in value))
        if kind in (dict, OrderedDict, defaultdict):
            pairs = tuple((self.value(k), self.value(v)) for k, v in value.items())
            return (kind, pairs, self.value(getattr(value, "default_factory", None)))
        if kind in (set, frozenset):
            return (kind, frozenset(self.value(v) for v in value))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if kind is types.MethodType:
            return (kind, self.value(value.__func__), self.value(value.__self__))
        if kind is functools.partial:
            return (kind, self.value((value.func, value.args, value.keywords)))
        if isinstance(value, nn.Module):
            return tuple(
                (name, self._module(module))
                for name, module in value.named_modules(remove_duplicate=False)
            )
        if isinstance(value, nn.Parameter):
            return self._form(value)
        if isinstance(value, weakref.ref):
            return self.value(value())
        if kind is Tensor:
            return self._content(value)
        if _is_plain(kind):
            if id(value) in self._seen:
                return ("again", self._seen[id(value)])
            self._seen[id(value)] = len(self._seen)
            return (kind, self.value(vars(value)))
        raise _Unknown

    def _module(self, module: nn.Module) -> Hashable:
        if id(module) in self._seen:
            return ("again", self._seen[id(module)])
        self._seen[id(module)] = len(self._seen)
        persistent = set(module._buffers) - module._non_persistent_buffers_set
        return (
            type(module),
            tuple((n, self._form(p)) for n, p in module._parameters.items()),
            tuple(
                (n, self._form(b) if n in persistent or b is None else self._content(b))
                for n, b in module._buffers.items()
            ),
            tuple(sorted(persistent)),
            tuple(
                (name, self.value(value))
                for name, value in sorted(vars(module).items())
                if name not in _NOT_STRUCTURE
            ),
        )

    def _form(self, tensor: Tensor | None) -> Hashable:
        if tensor is None:
            return None
        tied = self._seen.setdefault(id(tensor), len(self._seen))
        form = (type(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        constant: Hashable = None
        if self._constants and not tensor.requires_grad:
            constant = tensor_digest(tensor)
        place = self._place(tensor)
        return (*form, tensor.requires_grad, tied, self.value(vars(tensor)), place, constant)

    def _content(self, tensor: Tensor) -> Hashable:
        form = (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
        return (*form, self._place(tensor), tensor_digest(tensor))

    def _place(self, tensor: Tensor) -> Hashable:
        if not self._constants:
            return None
        memory = tensor.untyped_storage().data_ptr()
        return self._memory.setdefault(memory, len(self._memory)), tensor.storage_offset()

    def _function(self, function: types.FunctionType) -> Hashable:
        if "<locals>" not in function.__qualname__:
            return function
        if id(function) in self._seen:
            return ("again", self._seen[id(function)])
        self._seen[id(function)] = len(self._seen)
        try:
            closure = [cell.cell_contents for cell in function.__closure__ or ()]
            held = (closure, function.__defaults__, function.__kwdefaults__, vars(function))
            return (function.__code__, _Same(function.__globals__), self.value(held))
        except (_Unknown, ValueError):  # ValueError: the cell is empty as yet
            return function


def _is_plain(cls: type) -> bool:
    """Return whether the instances of a class hold everything in their `__dict__`."""
    heap = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was not compiled into Python
    ancestors = [c for c in cls.__mro__ if c is not object]
    return cls.__dictoffset__ != 0 and all(
        c.__flags__ & heap
        and "__slots__" not in vars(c)
        # A class written in C, as that of random.Random, makes instances with hidden fields.
        and isinstance(vars(c).get("__new__", staticmethod), staticmethod | type)
        for c in ancestors
    )
