"""A digest names bytes: equal bytes have equal digests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import xxhash


def digest(buffer: Any) -> str:
    """Return the xxh3_128 of a whole buffer as 32 hex digits.

    It finds damage; it does not stop somebody who may write the files.

    Args:
        buffer: bytes, a memoryview or a contiguous numpy array.
    """
    return xxhash.xxh3_128_hexdigest(buffer)


def file_digest(path: str | Path) -> str:
    """Return the digest of a file's bytes, which are not in memory all at once."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
