"""Reads what modules and functions hold beside parameters and buffers, to tell when it changes."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.storage.digest import digest

_REGISTERED = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"}
_ATOMS = (int, float, complex, str, bytes, bool, type(None))
_KEYS = (tuple, torch.device, torch.dtype)
_LONGEST = 1000
"""Of a longer collection, the length alone is read."""


def read_attributes(
    model: nn.Module, functions: Mapping[str, Any], buffers: Collection[str]
) -> dict[str, Any]:
    """Return what a model and functions hold, in tuples, dicts and sets of plain values.

    Each value goes by a description of its attribute. Objects are read if their class is from a
    package of the model's; somebody else's logger is not.

    Args:
        functions: the recipe's functions by their names.
        buffers: the names of those that hop; others are read as attributes are.
    """
    others = {name: buffer for name, buffer in model.named_buffers() if name not in buffers}
    reader = _Reader(model, others.values())
    found = {
        f"attribute {name!r} of {_described(module_name, module)}": reader.read(value)
        for module_name, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _REGISTERED
    }
    found |= {f"a value of the {name}": reader.read(f) for name, f in functions.items()}
    made = "buffer {!r}, which the first forward makes"
    return found | {made.format(name): reader.read(buffer) for name, buffer in others.items()}


def _described(name: str, module: nn.Module) -> str:
    return f"module {name!r}" if name else f"the model ({type(module).__name__})"


class _Reader:
    """Reads values beside the model's own modules, parameters and buffers."""

    def __init__(self, model: nn.Module, others: Iterable[Tensor]) -> None:
        modules = list(model.modules())
        self._known = {id(each) for each in (*modules, *model.parameters(), *model.buffers())}
        self._known -= {id(tensor) for tensor in others}
        self._packages = {_package(type(module)) for module in modules} - {"torch"}
        self._read: dict[int, tuple[Any, Any]] = {}  # with the value, which keeps its id

    def read(self, value: Any) -> Any:
        """Return a plain value; what refers to itself is read once."""
        if isinstance(value, _ATOMS):
            return type(value), repr(value)
        if id(value) in self._known:
            return ()
        if id(value) not in self._read:
            self._read[id(value)] = value, ()
            self._read[id(value)] = value, self._content(value)
        return self._read[id(value)][1]

    def _content(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return str(value.dtype), tuple(value.shape), _digest(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return str(value.dtype), value.shape, digest(np.ascontiguousarray(value).data)
        if (state := _generator_state(value)) is not None:
            return self.read(state)
        if isinstance(value, Collection) and len(value) > _LONGEST:
            return len(value)
        if isinstance(value, Mapping):
            return {_key(k): self.read(v) for k, v in value.items()}
        if isinstance(value, set | frozenset):
            return {_key(each) for each in value}
        if isinstance(value, list | tuple | deque):
            return tuple(self.read(each) for each in value)
        return tuple(self.read(each) for each in self._held_by(value))

    def _held_by(self, value: Any) -> list[Any]:
        if isinstance(value, types.FunctionType):
            cells = [cell for cell in value.__closure__ or () if not _is_empty(cell)]
            return [cell.cell_contents for cell in cells] + [value.__defaults__, vars(value)]
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        if isinstance(value, nn.Module) or _package(type(value)) in self._packages:
            return [getattr(value, "__dict__", ())]  # an unregistered module has all in there
        return []


def _key(value: Any) -> str:
    return repr(value) if isinstance(value, (*_ATOMS, *_KEYS)) else type(value).__qualname__


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _digest(tensor: Tensor) -> str:
    try:
        return tensor_digest(tensor)
    except (RuntimeError, NotImplementedError):  # it is sparse or has no values
        return ""


def _generator_state(value: Any) -> Any:
    """Return the state of a generator of random numbers, or None if the value is none."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, torch.Generator):
        return value.get_state()
    return None


def extends(longer: Any, shorter: Any) -> bool:
    """Tell whether values are equal, but for entries that only the longer dict or set has."""
    if isinstance(longer, dict) and isinstance(shorter, dict):
        return all(k in longer and extends(longer[k], v) for k, v in shorter.items())
    if isinstance(longer, set) and isinstance(shorter, set):
        return longer >= shorter
    if isinstance(longer, tuple) and isinstance(shorter, tuple):
        return len(longer) == len(shorter) and all(map(extends, longer, shorter))
    return bool(longer == shorter)
