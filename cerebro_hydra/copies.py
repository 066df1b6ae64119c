"""Copies objects of users, in which an `object()` stands for something and stays itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from cerebro_hydra.threads import SetForAll

T = TypeVar("T")

_DISPATCH: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]


def _keep_sentinels() -> Callable[[], object]:
    _DISPATCH[object] = lambda sentinel, memo: sentinel
    return lambda: _DISPATCH.pop(object)


_sentinels_kept = SetForAll(_keep_sentinels)


def deep_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """Return what `copy.deepcopy` does, but in it each `object()` is the same one.

    Code compares with one by `is`, such as to see whether something was set.

    Args:
        memo: copies by the id of their originals, as `copy.deepcopy` takes it and adds to it.
    """
    with _sentinels_kept():
        return copy.deepcopy(value, memo)
