"""Keeps values that can be made again: those that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Drops the values that were longest unused, but never the latest one. Not thread-safe.

    Args:
        most: how many values are kept.
        most_bytes: how many bytes they may have together.
        nbytes: returns the bytes of a value.
    """

    def __init__(
        self, most: int, most_bytes: int = 0, nbytes: Callable[[V], int] = lambda value: 0
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._nbytes = nbytes
        self._values: OrderedDict[K, V] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        """Return how many values are kept."""
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        """Return whether the value of a key is kept."""
        return key in self._values

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key; make it unless it is kept."""
        if key not in self._values:
            self.put(key, make())
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: K, value: V) -> None:
        """Keep a value in place of an older one of its key."""
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self) > 1 and (len(self) > self._most or self._total() > self._most_bytes):
            self._values.popitem(last=False)

    def drop(self, key: K) -> None:
        """Drop the value of a key, if it is kept."""
        self._values.pop(key, None)

    def _total(self) -> int:
        return sum(map(self._nbytes, self._values.values()))
