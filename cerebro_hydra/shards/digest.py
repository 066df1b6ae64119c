"""The name of a segment's bytes: equal bytes have equal digests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash


def digest(buffer: Any) -> str:
    """The xxh3_128 of a whole buffer as 32 hex digits.

    Args:
        buffer: bytes, a memoryview, a contiguous uint8 array or a uint8 CPU tensor.
    """
    if isinstance(buffer, torch.Tensor):
        buffer = buffer.detach().numpy()
    if isinstance(buffer, np.ndarray):
        buffer = np.ascontiguousarray(buffer).reshape(-1).view(np.uint8).data
    return xxhash.xxh3_128_hexdigest(buffer)
