"""A digest names a segment by its bytes: equal bytes have equal digests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import xxhash


def digest(buffer: Any) -> str:
    """Return the xxh3_128 of a whole buffer as 32 hex digits.

    Args:
        buffer: bytes, a memoryview, a contiguous numpy array or a CPU tensor.
    """
    if isinstance(buffer, torch.Tensor):
        buffer = buffer.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(buffer)


def file_digest(path: str | Path) -> str:
    """Return the digest of a file's bytes, which are not in memory all at once."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
