"""Digests, which name a segment by its bytes: equal bytes have equal digests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash


def digest(buffer: Any) -> str:
    """Return the xxh3_128 of a whole buffer as 32 hex digits.

    Args:
        buffer: bytes, a memoryview, a numpy array or a CPU tensor.
    """
    if isinstance(buffer, torch.Tensor):
        buffer = buffer.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(buffer, np.ndarray):
        buffer = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data
    return xxhash.xxh3_128_hexdigest(buffer)
