"""Makes what CUDA computes the same each time, and what unlike CPUs compute the same on each."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

_exact: list[torch.library.Library] = []
_registering = threading.Lock()

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


def compute_as(numerics: str) -> None:
    """Let this process, whose kernels are chosen so, compute the same bits as its like.

    With "portable" that takes more than `KERNELS`: MKL makes square roots of approximations that
    are each CPU's own, in any of its modes, and a fifth of them are not the nearest number. NumPy's
    come from the instruction that IEEE 754 defines. It can't be undone in this process.
    """
    if numerics != "portable":
        return
    with _registering, warnings.catch_warnings():
        if _exact:
            return
        warnings.simplefilter("ignore")  # that torch has this operation already
        library = torch.library.Library("aten", "IMPL")
        library.impl("sqrt", exact_sqrt, "CPU")
        library.impl("sqrt_", lambda x: _sqrt_into(x, out=x), "CPU")
        library.impl("sqrt.out", _sqrt_into, "CPU")
        _exact.append(library)  # its end would undo it


def computes_portably() -> bool:
    """Return whether this process was told to by `compute_as`."""
    return bool(_exact)


def exact_sqrt(x: Tensor) -> Tensor:
    """Return the square roots of a tensor's elements, each the nearest number of its type."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return exact_sqrt(x.float()).to(x.dtype)
    if not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.get_default_dtype())
    with np.errstate(invalid="ignore"):  # of a negative number it is NaN, as torch's
        return torch.from_numpy(
            np.asarray(np.sqrt(x.detach().resolve_conj().resolve_neg().numpy()))
        )


def _sqrt_into(x: Tensor, *, out: Tensor) -> Tensor:
    root = exact_sqrt(x)
    if not torch.can_cast(root.dtype, out.dtype):
        raise RuntimeError(
            f"result type {root.dtype} can't be cast to the desired output type {out.dtype}"
        )
    return out.resize_(root.shape).copy_(root)


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
