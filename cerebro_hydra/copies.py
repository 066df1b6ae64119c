"""Copies objects of users, in which what stands for something, such as `object()`, stays itself."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Container, Iterator
from enum import Enum
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.threads import SetForAll

T = TypeVar("T")

_MOST = 10_000
"""Objects in which attributes are looked for."""
_ATOMS = (str, int, float, type(None), Enum)
_CONTAINERS = (dict, list, set, frozenset, tuple, str, bytes, int, float)
_DISPATCH: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]


def _keep_sentinels() -> Callable[[], object]:
    _DISPATCH[object] = lambda sentinel, memo: sentinel
    return lambda: _DISPATCH.pop(object)


_sentinels_kept = SetForAll(_keep_sentinels)


def deep_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """Return what `copy.deepcopy` does, but in it each `object()` is the same one.

    So is an object, with numbers and texts at most, to which a variable of a module or a class
    refers. Code compares with one by `is`, such as to see whether something was set.

    Args:
        memo: copies by the id of their originals, as `copy.deepcopy` takes it and adds to it.
    """
    memo = {} if memo is None else memo
    held = [each for each in _held_by(value, memo) if _is_plain(each)]
    memo |= {id(each): each for each in held if _is_named(each, value)}
    with _sentinels_kept():
        return copy.deepcopy(value, memo)


def _held_by(value: Any, known: Container[int]) -> Iterator[Any]:
    """Yield what an object has in attributes, in containers there, and in attributes of those."""
    left, seen = [getattr(value, "__self__", value)], set[int]()
    while left and len(seen) < _MOST:
        each = left.pop()
        if id(each) in known:
            continue
        if id(each) not in seen and hasattr(each, "__dict__") and not isinstance(each, type):
            seen.add(id(each))
            inner = tree_leaves(dict(vars(each)))
            left += inner
            yield from inner


def _is_named(value: Any, holder: Any) -> bool:
    """Return whether code can compare with an object by a name that it has beside its holder."""
    kinds = [*type(value).__mro__, *type(getattr(holder, "__self__", holder)).__mro__]
    modules = (sys.modules.get(kind.__module__) for kind in kinds)
    places = (*kinds, *filter(None, modules))
    return any(value is each for place in places for each in tuple(vars(place).values()))


def _is_plain(value: Any) -> bool:
    """Return whether it is an object of a class of Python's that has numbers and texts at most."""
    kind = type(value)
    if not hasattr(value, "__dict__") and not any("__slots__" in vars(k) for k in kind.__mro__):
        return False
    if isinstance(value, (type, nn.Module, Tensor, *_CONTAINERS)):
        return False
    state = object.__getstate__(value)
    parts = state if isinstance(state, tuple) else (state,)
    return all(isinstance(each, _ATOMS) for part in parts for each in (part or {}).values())
