"""Gives what the C library keeps of freed memory back to the system."""

from __future__ import annotations

import ctypes

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it; others need it less


def trim_heap() -> None:
    """Return free pages, which takes some milliseconds; freed tensors keep them else."""
    if _TRIM is not None:
        _TRIM(0)
