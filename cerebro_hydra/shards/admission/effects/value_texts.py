"""Says what stands in a reading for a value that holds no other, such as a text or a tensor.

Tells what has numbers and texts alone: settings.
"""

from __future__ import annotations

import array
import ctypes
import dis
import functools
import itertools
import logging
import re
import threading
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cerebro_hydra.shards.admission.effects.named_by_code import kept_by_code, operations
from cerebro_hydra.shards.admission.effects.readings import NOTHING
from cerebro_hydra.shards.digest import tensor_digest
from cerebro_hydra.storage.digest import digest

_NUMBERS = {int, float, bool}
ATOMS = {*_NUMBERS, complex, str, bytes, type(None), type(...)}
PLAIN = {*_NUMBERS, complex, str, type(None)}
"""The types of values that nothing changes in place."""
_DERIVED: tuple[type, ...] = (int, float, complex, str, bytes)
NAMED = (
    type, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_CODE = (
    types.FunctionType, types.MethodType, functools.partial, types.ModuleType, nn.Module, Tensor,
)  # fmt: skip
_NO_SETTINGS = (
    *NAMED, *_DERIVED, np.generic, logging.Logger, type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip
"""What settings may hold beside numbers and texts, and which has none itself."""
_CTYPES = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)
_BUFFERS = (bytearray, memoryview, array.array)
_BY_ROWS = ("crow_indices", "col_indices", "values")
_BY_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _BY_ROWS,
    torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS,
    torch.sparse_bsc: _BY_COLUMNS,
    torch._mkldnn: ("to_dense",),  # type: ignore[attr-defined]
}
"""What tensors consist of that are not strided, by their layout."""
_MOST_SETTINGS = 1000
_SHOWN = 64
"""Characters of what is read of a value; of a longer text it is the digest."""


def short(text: str) -> str:
    """Return a text, or the digest of one that is long."""
    return text if len(text) <= _SHOWN else digest(text.encode(errors="surrogatepass"))


def atom_text(value: object) -> str:
    """Return what is read of a value of one of the types of `ATOMS`."""
    return NOTHING if value is None else short(f"{type(value).__name__} {value!r}")


def module_of(code: type | types.FunctionType) -> str:
    """Return the module of a class or a function, which a child has of a script by another name."""
    return "__main__" if code.__module__ == "__mp_main__" else code.__module__


def name_of_type(kind: type) -> str:
    """Return the name of a type with its module."""
    return f"{module_of(kind)}.{kind.__qualname__}".removeprefix("builtins.")


def tensor_text(value: Tensor) -> str:
    """Return the type, the shape and, if it has values, the digest of a tensor."""
    parts = (getattr(value, name)() for name in _PARTS.get(value.layout, ()))
    try:
        content = " ".join(map(tensor_digest, parts)) or tensor_digest(value)
    except (RuntimeError, NotImplementedError):  # it has no values, as on the meta device
        content = ""
    return f"tensor {value.dtype} {tuple(value.shape)} {content}"


def function_text(value: types.FunctionType) -> str:
    """Return the name of a function and the digest of its code."""
    return f"function {module_of(value)}.{value.__qualname__} {code_digest(value.__code__)}"


def place_text(value: Any) -> str:
    """Return what stands in the place of a function, or of what has a name of its own."""
    if isinstance(value, types.FunctionType):
        return function_text(value)
    named = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or value
    return f"{name_of_type(type(value))} {getattr(value, '__module__', None)}.{named}"


@kept_by_code
def code_digest(code: types.CodeType) -> str:
    """Return the digest of what code does: not of where it is written, nor of its docstring."""
    loaded = sorted({n for each, n in operations(code) if each in dis.hasconst})
    constants = [_constant_text(code.co_consts[number]) for number in loaded]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    said = constants, code.co_names, arguments, code.co_freevars, code.co_flags
    return digest(code.co_code + repr(said).encode(errors="surrogatepass"))


def _constant_text(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):  # whose order is another one in each process
        return f"{{{', '.join(sorted(map(_constant_text, value)))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant_text, value))})"
    return repr(value)


def plain_text(value: Any) -> str | None:
    """Return what is read of a value that holds no other, None of any other."""
    if isinstance(value, types.FunctionType):
        held = (value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value))
        return None if any(held) else function_text(value)
    if isinstance(value, np.generic) or (
        isinstance(value, np.ndarray) and not value.dtype.hasobject
    ):
        flat = np.ascontiguousarray(value).reshape(-1)
        content = digest(flat.view(np.uint8) if flat.dtype.itemsize else b"")
        if isinstance(value, np.ma.MaskedArray):
            content += digest(np.ma.getmaskarray(value).tobytes())
        return f"{type(value).__name__} {value.dtype} {value.shape} {content}"
    if isinstance(value, _CTYPES):
        return f"{name_of_type(type(value))} {digest(bytes(value))}"
    if isinstance(value, _BUFFERS):
        return f"{name_of_type(type(value))} {len(value)} {digest(bytes(value))}"
    if isinstance(value, Enum):
        content = f" {short(repr(value.value))}" if type(value.value) in ATOMS else ""
        return f"enum {name_of_type(type(value))} {value.name}{content}"
    if isinstance(value, NAMED):
        return f"{name_of_type(type(value))} {getattr(value, '__qualname__', None) or value}"
    if isinstance(value, itertools.count | np.random.SeedSequence):
        return repr(value)
    if isinstance(value, re.Pattern):
        return short(f"pattern {value.pattern!r} {value.flags}")
    if isinstance(value, _DERIVED):  # of a class that is derived from one of these
        own = next(kind for kind in _DERIVED if isinstance(value, kind))
        return short(f"{name_of_type(type(value))} {own.__repr__(value)}")  # type: ignore[call-arg]
    return None


def are_plain(values: Iterable[Any]) -> bool:
    """Return whether all of them are numbers, texts and the like."""
    return set(map(type, values)) <= ATOMS


def digest_of(values: Collection[Any]) -> str:
    """Return the digest of plain values; that of numbers is quick."""
    if set(map(type, values)) <= {float}:
        return digest(np.fromiter(values, np.float64, len(values)))
    return digest(repr(tuple(values)).encode(errors="surrogatepass"))


def are_settings(value: Any, code: bool = False) -> bool:
    """Return whether a value is an object or a container of numbers and texts, and of such ones.

    Args:
        code: whether functions may be among them.
    """
    left, seen = [value], dict[int, Any]()
    while left and len(left) + len(seen) <= _MOST_SETTINGS:
        each = left.pop()
        if type(each) in ATOMS or id(each) in seen:
            continue
        if code and isinstance(each, types.FunctionType):
            continue
        if (held := _held_by_settings(each)) is None:
            return False
        seen[id(each)] = each
        left += held
    return not left


def _held_by_settings(value: Any) -> list[Any] | None:
    """Return what is in a value, None if that is code, or what Python can't see."""
    if isinstance(value, _CODE):
        return None
    if isinstance(value, _NO_SETTINGS) or type(value).__module__ == "typing":
        return []
    held = [*getattr(value, "__dict__", {}).values(), *(each for _, each in slots_of(value))]
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return [*held, *(value.values() if isinstance(value, dict) else value)]
    kind = type(value)
    is_python = hasattr(value, "__dict__") or _slots(kind) or kind is object  # type: ignore[arg-type]
    return held if is_python else None


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of an object's slots, of those that are set."""
    for owner, name in _slots(type(value)):  # type: ignore[arg-type]
        with suppress(AttributeError):  # it was never set
            yield name, vars(owner)[name].__get__(value)


@functools.lru_cache(1000)
def _slots(kind: type) -> tuple[tuple[type, str], ...]:
    """Return the names of an object's slots, each with the class that has it."""
    return tuple(
        (owner, name)
        for owner in kind.__mro__
        for name, each in vars(owner).items()
        if isinstance(each, types.MemberDescriptorType) and "__slots__" in vars(owner)
    )
