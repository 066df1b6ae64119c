"""Switches off the fast path of attention, which is one setting of the whole process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_users = 0
_before = True


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Run without the fast path; it comes back when the last of several threads has left."""
    global _users, _before
    with _lock:
        if _users == 0:
            _before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                torch.backends.mha.set_fastpath_enabled(_before)
