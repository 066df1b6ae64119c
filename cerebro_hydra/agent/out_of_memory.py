"""Recognises that memory ran out, in the words of Python, numpy and torch, and says how much."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

_CUDA_MEMORY_ALLOCATION = 2  # `cudaErrorMemoryAllocation`, where torch's own allocator didn't ask
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"  # torch has no type for this one
_CUBLAS = "CUBLAS_STATUS_ALLOC_FAILED"
_ASKED = re.compile(r"to allocate (\d[\d.]*) ?(\w+)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def memory_that_ran_out(error: BaseException) -> str | None:
    """Return whose memory ran out, and how much was asked for; None if the error is another one.

    An error that was raised while this one was handled, or because of it, counts too.
    """
    for each in _chain(error):
        words = str(each)
        device = isinstance(each, torch.OutOfMemoryError) or (
            isinstance(each, RuntimeError)
            and (getattr(each, "error_code", None) == _CUDA_MEMORY_ALLOCATION or _CUBLAS in words)
        )
        if device or isinstance(each, MemoryError) or _is_torch_on_cpu(each, words):
            return f"the {'GPU' if device else 'machine'} has no room for {_asked(words)}"
    return None


def _is_torch_on_cpu(error: BaseException, words: str) -> bool:
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in words


def _asked(words: str) -> str:
    found = _ASKED.search(words)
    if found is None or found[2] not in _UNITS:
        return "what it asked for"
    return f"{float(found[1]) * _UNITS[found[2]] / _UNITS['GiB']:,.2f} GiB more"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__]
