"""Computes the checksum of row ids, and the seeded order in which training visits rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_CHUNK = 1 << 20  # bounds the memory of a checksum over a range of any length


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map 64-bit numbers one to one to well mixed ones, by the finaliser of splitmix64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
    with the constants of Vigna's splitmix64.c.
    """
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def mixed_key(*parts: int) -> int:
    """Fold integers, whose order counts, into one 64-bit number."""
    key = 0
    for part in parts:
        # Array arithmetic wraps as it must; numpy's scalars would warn.
        key = int(mix64(np.array([key ^ (part & _MASK)], dtype=np.uint64))[0])
    return key


def checksum(ids: NDArray[np.int64] | range) -> int:
    """Sum the mixed row ids modulo 2^64; any order gives the same number.

    A row that is lost, repeated, or exchanged for another changes it; a count alone may not.
    """
    total = 0
    for start in range(0, len(ids), _CHUNK):
        chunk = np.asarray(ids[start : start + _CHUNK], dtype=np.int64)
        total += int(mix64(chunk.view(np.uint64)).sum(dtype=np.uint64))
    return total & _MASK


def permutation(rows: int, key: int) -> NDArray[np.int64]:
    """Return an order of row positions that `key` alone decides, on every machine and numpy."""
    with np.errstate(over="ignore"):
        values = np.uint64(key & _MASK) + np.arange(rows, dtype=np.uint64)
    # The mixed values differ from each other, so that sorting them leaves no ties.
    return np.argsort(mix64(values), kind="stable").astype(np.int64, copy=False)
