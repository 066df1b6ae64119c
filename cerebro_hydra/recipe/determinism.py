"""Makes what CUDA computes the same each time; a CPU computes so by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The setting without which cuBLAS may choose other algorithms each time; torch asks for it."""


def compute_deterministically(device: torch.device) -> None:
    """Let this process train on a device with the same bits each time; call it before CUDA is used.

    An operation that CUDA has in no such form is an error of torch, which names it. TF32 stays as
    the user's code sets it.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.cuda.set_device(device)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Compute so for a while, in a process that has other uses of CUDA."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    current = torch.cuda.current_device()
    try:
        compute_deterministically(device)
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.cuda.set_device(current)
