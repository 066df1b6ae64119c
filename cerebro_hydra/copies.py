"""Copies objects of users, in which what stands for something, such as `object()`, stays itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cerebro_hydra.threads import SetForAll

T = TypeVar("T")

_DISPATCH: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]


def _keep_sentinels() -> Callable[[], object]:
    _DISPATCH[object] = lambda sentinel, memo: sentinel
    return lambda: _DISPATCH.pop(object)


_sentinels_kept = SetForAll(_keep_sentinels)


def deep_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """Return what `copy.deepcopy` does, but in it each `object()` is the same one.

    So is an attribute that has no attributes itself. Code compares with one by `is`, such as to see
    whether something was set.

    Args:
        memo: copies by the id of their originals, as `copy.deepcopy` takes it and adds to it.
    """
    memo = {} if memo is None else memo
    modules = value.modules() if isinstance(value, nn.Module) else [value]
    attributes = [dict(vars(each)) for each in modules if hasattr(each, "__dict__")]
    memo |= {id(each): each for each in tree_leaves(attributes) if _has_nothing(each)}
    with _sentinels_kept():
        return copy.deepcopy(value, memo)


def _has_nothing(value: Any) -> bool:
    """Return whether it is an object of a class of Python's, without anything of its own."""
    return (
        getattr(value, "__dict__", None) == {}
        and not isinstance(value, type | nn.Module | Tensor)
        and all(base is object or "__module__" in vars(base) for base in type(value).__mro__)
        and object.__getstate__(value) is None
        and not isinstance(value, dict | list | set | frozenset | tuple | str | bytes | int | float)
    )
