"""Recognises that memory ran out, in the words of Python, numpy and torch, and says how much."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from cerebro_hydra.foreign_text import attribute_of, error_text, is_error, origins_of
from cerebro_hydra.shards.engine.microbatch import SMALLER_BATCHES, BatchTooLarge

REMEDY = f"use {SMALLER_BATCHES}, or run fewer agents on a machine"

_CUDA_MEMORY_ALLOCATION = 2  # `cudaErrorMemoryAllocation`, where torch's own allocator didn't ask
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"  # torch has no type for this one
_CUBLAS = "CUBLAS_STATUS_ALLOC_FAILED"
_ASKED = re.compile(r"to allocate (\d[\d.]*) ?(\w+)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def memory_that_ran_out(error: BaseException) -> str | None:
    """Return whose memory ran out, how much was asked for, and what to do; None if it is no such.

    An error that was raised while this one was handled, or because of it, counts too.
    """
    for each in _chain(error):
        if is_error(each, BatchTooLarge):
            return error_text(each)
        words = error_text(each)
        torch_error = is_error(each, RuntimeError)
        code = attribute_of(each, "error_code")
        if is_error(each, torch.OutOfMemoryError) or (
            torch_error and (code == _CUDA_MEMORY_ALLOCATION or _CUBLAS in words)
        ):
            return f"the GPU has no room for {_asked(words)}; {REMEDY}"
        if is_error(each, MemoryError) or (torch_error and _CPU_ALLOCATOR in words):
            return f"the machine has no room for {_asked(words)}; {REMEDY}"
    return None


def _asked(words: str) -> str:
    found = _ASKED.search(words)
    if found is None or found[2] not in _UNITS:
        return "what it asked for"
    return f"{float(found[1]) * _UNITS[found[2]] / _UNITS['GiB']:,.2f} GiB more"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            left += origins_of(each)
