"""Lets the kernel read the next batches while one is trained, where memory can't hold all rows."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from cerebro_hydra.available_memory import usable_memory

SHARE = 0.25
"""The part of memory up to which the pages of a partition are taken to stay there once read."""


class ReadAhead:
    """Asks for the pages of rows before they are needed; nothing waits, and no thread is started.

    Rows are visited in a random order, so the kernel's own guess, that the following pages come
    next, is switched off: it would read many times what is used.

    Args:
        columns: those of a partition that are memory maps, shape (rows, ...); others are left out.
    """

    def __init__(self, columns: Iterable[NDArray[np.generic]]) -> None:
        self._maps: list[tuple[mmap.mmap, int, int]] = []
        """Each map, where its first row begins there, and the bytes of a row."""
        for column in columns:
            # What follows the kernel's own names is missing where it has no such advice.
            if not isinstance(column, np.memmap) or not hasattr(mmap, "MADV_WILLNEED"):
                continue
            mapped: mmap.mmap = column._mmap  # type: ignore[attr-defined]
            first = column.offset % mmap.ALLOCATIONGRANULARITY
            self._maps.append((mapped, first, column.nbytes // max(1, len(column))))
            with suppress(OSError):  # no file system has to take advice
                mapped.madvise(mmap.MADV_RANDOM)

    def expect(self, rows: NDArray[np.int64]) -> None:
        """Ask for the pages of these rows, which the disk reads meanwhile."""
        for mapped, first, row_bytes in self._maps:
            for start, nbytes in page_runs(first + rows * row_bytes, row_bytes):
                with suppress(OSError):
                    mapped.madvise(mmap.MADV_WILLNEED, start, min(nbytes, len(mapped) - start))


def page_runs(starts: NDArray[np.int64], nbytes: int) -> list[tuple[int, int]]:
    """Return the start and bytes of each run of pages that holds any of these ranges, in order.

    Args:
        starts: where each range begins, in bytes; in any order.
        nbytes: the size of each.
    """
    if not len(starts) or not nbytes:
        return []
    begins = np.sort(starts)
    first, last = begins // mmap.PAGESIZE, (begins + nbytes - 1) // mmap.PAGESIZE
    # A run ends where the next range begins beyond the page after it.
    apart = np.flatnonzero(first[1:] > last[:-1] + 1)
    heads, tails = np.append(0, apart + 1), np.append(apart, len(begins) - 1)
    return [
        (int(a) * mmap.PAGESIZE, (int(b) - int(a) + 1) * mmap.PAGESIZE)
        for a, b in zip(first[heads], last[tails], strict=True)
    ]


def may_leave_memory(nbytes: int) -> bool:
    """Return whether so many bytes of a partition may leave memory between two epochs."""
    return nbytes > SHARE * usable_memory()
