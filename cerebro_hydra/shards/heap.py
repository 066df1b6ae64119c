"""Lets the C library keep freed memory while large tensors come and go, and gives it back."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # their numbers in glibc's malloc.h
_LIBRARY = ctypes.CDLL(None)
_IS_GLIBC = hasattr(_LIBRARY, "mallopt")


_users = 0
_lock = threading.Lock()

LEAST_TRIMMED = 16 << 20
"""Freed bytes below which the heap is left alone."""

TRIM_SECONDS = 0.5
"""Seconds between two times at which gaps in the heap are given back while tasks are done."""

_trimmed = 0.0  # when that was done

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it; others need it less


def share_heap() -> None:
    """Let threads that begin from now on use one heap, so that each one's gaps serve all."""
    if _IS_GLIBC:
        _LIBRARY.mallopt(_ARENA_MAX, 1)


@contextmanager
def kept_heap() -> Iterator[None]:
    """Save the page faults of tensors below 32 MiB that are freed and made again in every step.

    Larger ones go back at once: kept, they could leave gaps of several times their size. It is of
    use on the main thread, and to the whole process. After its last user all freed memory goes
    back, and the limits are those that glibc reaches by itself.
    """
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _users
    with _lock:
        _users += change
        if not _IS_GLIBC:
            return
        _LIBRARY.mallopt(_MMAP_THRESHOLD, 32 << 20)
        _LIBRARY.mallopt(_TRIM_THRESHOLD, 2**31 - 1 if _users else 64 << 20)
        if not _users:
            _LIBRARY.malloc_trim(0)


def trim_heap(freed: int) -> None:
    """Return free pages after so many bytes were freed, which takes about 5 ms.

    Gaps between living blocks would else add up to several times the gradients.
    """
    if freed >= LEAST_TRIMMED and _TRIM is not None:
        _TRIM(0)


def trim_now_and_then(within: float = TRIM_SECONDS) -> None:
    """Return free pages, unless someone has the heap kept or it was done within so many seconds."""
    global _trimmed
    if not _users and time.monotonic() - _trimmed >= within:
        trim_heap(LEAST_TRIMMED)
        _trimmed = time.monotonic()
