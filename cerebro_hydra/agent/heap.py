"""Gives what the C library keeps of freed memory back to the system."""

from __future__ import annotations

import ctypes

LEAST_TRIMMED = 16 << 20
"""Freed bytes below which the heap is left alone."""

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it; others need it less


def trim_heap(freed: int) -> None:
    """Return free pages after so many bytes were freed, which takes about 5 ms.

    Gaps between living blocks would else add up to several times the gradients.
    """
    if freed >= LEAST_TRIMMED and _TRIM is not None:
        _TRIM(0)
