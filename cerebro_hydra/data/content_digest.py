"""Digests the contents of columns, by sums that do not depend on the order of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.data.row_ids import mix64

_MASK = (1 << 64) - 1
_BLOCK = 1 << 14  # rows, or words, that are hashed at once and stay in the processor's cache


class ContentDigest:
    """Sums a hash of (row id, value) over the rows of each column, modulo 2^64.

    Values are hashed by their bits, so that 0.0 and -0.0 differ. A change within one 32-bit word
    always changes the digest of its column. Any other change, such as an exchange of values, goes
    unseen with a chance of about 2^-64, or of 2^-32 if only the highest bits of words differ. The
    digest guards against damage, not against somebody who computes it anew.
    """

    def __init__(self, columns: int) -> None:
        """Begin with no row."""
        self._sums = [0] * columns

    def add(self, ids: NDArray[np.int64], columns: Sequence[NDArray[Any]]) -> None:
        """Add rows: their ids, and for each column an array of shape (rows, *shape of a row)."""
        for start in range(0, len(ids), _BLOCK):
            rows = slice(start, start + _BLOCK)
            keys = mix64(ids[rows].view(np.uint64))
            for i, values in enumerate(columns):
                hashes = mix64(keys ^ row_hashes(values[rows]))
                self._sums[i] = (self._sums[i] + int(hashes.sum(dtype=np.uint64))) & _MASK

    @property
    def digests(self) -> tuple[int, ...]:
        """Return the digest of each column."""
        return tuple(self._sums)


def row_hashes(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Hash each row of an array of shape (rows, ...) by its bits; shape (rows,).

    A row is the sum of its 32-bit words, each times an odd 64-bit factor of its place, modulo 2^64:
    one changed word always shows.

    Source: Lemire, Kaser, "Strongly universal string hashing is fast", The Computer Journal 2014
    (multilinear hashing).
    """
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    words = flat.view(np.uint8 if flat.dtype == np.bool_ else np.uint32)
    width = words.shape[1]
    factors = mix64(np.arange(width, dtype=np.uint64)) | np.uint64(1)
    hashes = np.empty(len(words), np.uint64)
    rows = max(1, _BLOCK // max(1, width))
    for start in range(0, len(words), rows):
        block = words[start : start + rows].astype(np.uint64)
        hashes[start : start + rows] = np.einsum("ij,j->i", block, factors)
    return hashes
