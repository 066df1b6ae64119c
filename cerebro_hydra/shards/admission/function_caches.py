"""Reads what the caches of functools keep: the results of functions, by their arguments."""

from __future__ import annotations

import functools
import gc
from collections.abc import Collection, Mapping, Sequence
from typing import Any

PART = "\0"
"""Parts the components of a path."""

Cache = functools._lru_cache_wrapper


def kept_results(cache: Cache[Any]) -> list[tuple[Any, Any]]:
    """Return the keys and results that a cached function has now, in no order that tells.

    A key is a single number or text, or a sequence of arguments. The list is empty if this Python
    keeps them in another way.
    """
    parts: list[Any] = gc.get_referents(cache)
    size = cache.cache_info().currsize
    own = vars(cache)
    (kept,) = [e for e in parts if type(e) is dict and e is not own and len(e) == size][:1] or [{}]
    if cache.cache_info().maxsize is None:
        return list(kept.items())
    # A cache with a limit has them as links of a list, each a key and its result.
    links = type(next(iter(kept.values()), None))
    flat = [each for each in parts if each is not type(cache) and each is not links]
    pairs = list(zip(flat[: 2 * size : 2], flat[1 : 2 * size : 2], strict=False))
    try:
        return pairs if len(pairs) == size and all(key in kept for key, _ in pairs) else []
    except TypeError:  # what stands there is no key
        return []


class FilledCaches:
    """Takes out of caches what they were filled with, for a while.

    Args:
        functions: those with a cache; what they are asked for again, they compute again.
        dicts: by name, each with the keys that it had before.
    """

    def __init__(
        self,
        functions: Sequence[Cache[Any]],
        dicts: Mapping[str, tuple[dict[Any, Any], Collection[Any]]],
    ) -> None:
        self._functions = [each for each in functions if each.cache_info().currsize]
        self._dicts = {
            name: (mapping, {key: mapping[key] for key in mapping if key not in known})
            for name, (mapping, known) in dicts.items()
        }

    @property
    def are_filled(self) -> bool:
        """Return whether there is anything to take out."""
        return bool(self._functions) or any(added for _, added in self._dicts.values())

    def hold(self, path: str) -> bool:
        """Return whether a value is in one of the dicts."""
        return path.partition(PART)[0] in self._dicts

    def empty(self) -> None:
        """Take it out."""
        for function in self._functions:
            function.cache_clear()
        for mapping, added in self._dicts.values():
            for key in added:
                mapping.pop(key, None)

    def fill(self) -> None:
        """Put back what was in the dicts."""
        for mapping, added in self._dicts.values():
            mapping.update(added)
