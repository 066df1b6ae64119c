"""Lets the C library keep freed memory while large tensors come and go."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # their numbers in glibc's malloc.h
_MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries keep more by themselves


_users = 0
_lock = threading.Lock()


@contextmanager
def kept_heap() -> Iterator[None]:
    """Save the page faults of gradients that are freed and made again in every step.

    It is of use on the main thread, and to the whole process. After its last user the limits are
    those that glibc reaches by itself once a tensor of 32 MiB was freed.
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
        if _MALLOPT is None:
            return
        _MALLOPT(_MMAP_MAX, 0 if _users else 65536)
        _MALLOPT(_MMAP_THRESHOLD, 32 << 20)
        _MALLOPT(_TRIM_THRESHOLD, 2**31 - 1 if _users else 64 << 20)
