"""A digest names bytes: equal bytes have equal digests."""

from __future__ import annotations

from typing import Any

import xxhash


def digest(buffer: Any) -> str:
    """Return the xxh3_128 of a whole buffer as 32 hex digits.

    It finds damage; it does not stop somebody who may write the files.

    Args:
        buffer: bytes, a memoryview or a contiguous numpy array.
    """
    return xxhash.xxh3_128_hexdigest(buffer)
