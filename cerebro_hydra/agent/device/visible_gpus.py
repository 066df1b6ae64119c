"""Names the environment variables by which a process sees some GPUs, and lets it see one."""

from __future__ import annotations

import os

VISIBLE = "CUDA_VISIBLE_DEVICES"

# nvidia-smi counts by bus, CUDA by speed unless it is told otherwise.
ORDER = "CUDA_DEVICE_ORDER"
BY_BUS = "PCI_BUS_ID"

# Slots come and go in the sizes of many shards, and the gaps of fixed segments would add up.
_ALLOCATOR, _OLDER_NAME = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_WITHOUT_GAPS = "expandable_segments:True"

RESERVED_SHARE = 0.1
"""The share of a GPU that is left for what kernels take and for gaps between tensors."""

LEAST_RESERVED = 1 << 30
"""Bytes that are left for that on any GPU."""


def reserved(total: int) -> int:
    """Return the bytes that are left to kernels and gaps of a GPU with so many."""
    return max(LEAST_RESERVED, int(total * RESERVED_SHARE))


def show_gpu(name: str) -> None:
    """Let this process, where CUDA was not started, see one GPU alone.

    Args:
        name: its index by bus or its uuid, as Spark's discovery script names it.
    """
    os.environ.update({VISIBLE: name, ORDER: BY_BUS})
    if _OLDER_NAME not in os.environ:
        os.environ.setdefault(_ALLOCATOR, _WITHOUT_GAPS)
