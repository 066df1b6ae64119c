"""Tells what the bits of a result depend on beside code and data: the numeric fingerprint."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.kernels import KERNELS
from cerebro_hydra.recipe.compiled_units import compiler_version
from cerebro_hydra.recipe.randomness import WORKSPACE, computes_portably

Product = Callable[[Tensor, Tensor], Tensor]

_STRICT = 1 << 16
_BRANCHES = {
    1: "OFF", 2: "AUTO", 3: "COMPATIBLE", 4: "SSE2", 6: "SSSE3", 7: "SSE4_1", 8: "SSE4_2", 9: "AVX",
    10: "AVX2", 11: "AVX512_MIC", 12: "AVX512", 13: "AVX512_MIC_E1", 14: "AVX512_E1",
}  # fmt: skip
"""MKL's own numbers, of mkl_types.h, for the branches of conditional numerical reproducibility."""

_INSTRUCTION_SETS = (
    "sse4_1", "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512dq",
    "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8",
)  # fmt: skip
_PROCESSOR = ("vendor_id", "model name", "cpu family", "model", "stepping")
_OF_THE_CPU = frozenset({"processor", "instructions", "mkl_instructions"})
"""What the portable kernels don't look at."""

_ROWS, _INNER, _OUTER = (1, 8, 17), (31, 64, 128), (1, 10, 32)
_OFFSETS = ((4, 0), (0, 4), (8, 8))


def numeric_fingerprint(device: str = "cpu") -> dict[str, Any]:
    """Return what a run's bits depend on beside code and data; replay warns where it differs.

    Beside torch, threads and the kind of device these are: the `processor` and the `instructions`
    that it has, the path that ATen takes (`cpu`), MKL's version, mode and limit, oneDNN's limit,
    and whether the `addresses` of operands matter; and the C++ `compiler` of torch.compile, None
    where it can't be had.

    Args:
        device: the kind of device that trains; only "cuda" lets this process look at a GPU.
    """
    processor, instructions = _processor()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "optimizer": device,
        "processor": processor,
        "instructions": instructions,
        "mkl": _mkl_version(),
        "mkl_mode": mkl_mode(),
        "mkl_instructions": os.environ.get("MKL_ENABLE_INSTRUCTIONS"),
        "onednn_limit": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "addresses": "any" if exact_by_address() else "aligned",
        "square_roots": "nearest" if computes_portably() else "MKL's",
        "compiler": compiler_version(),
    }
    if device == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            WORKSPACE: os.environ.get(WORKSPACE),
        }
    return found


def fingerprint_differences(
    here: Mapping[str, Any], there: Mapping[str, Any], compiles: bool = False
) -> Iterator[tuple[str, Any, Any]]:
    """Yield what may make two processes compute other bits: its name, and both values.

    What only `there` has is compared, so that the fingerprint of an older version says what it
    can. Two processes with portable kernels may have unlike CPUs.

    Args:
        compiles: whether a trial is meant whose blocks are compiled.
    """
    alike = _OF_THE_CPU if is_portable(here) and is_portable(there) else frozenset()
    alike = alike if compiles else alike | {"compiler"}
    for name, value in there.items():
        if name not in alike and here.get(name) != value:
            yield name, here.get(name), value


def is_portable(fingerprint: Mapping[str, Any]) -> bool:
    """Return whether a process computes as numerics="portable" does; see `compute_as`."""
    return has_portable_kernels(fingerprint) and fingerprint.get("square_roots") == "nearest"


def has_portable_kernels(fingerprint: Mapping[str, Any]) -> bool:
    """Return whether the libraries of a process were told to choose as "portable" does."""
    wanted = KERNELS["portable"]
    return (
        fingerprint.get("mkl_mode") in (None, wanted["MKL_CBWR"])
        and str(fingerprint.get("cpu")).lower() == wanted["ATEN_CPU_CAPABILITY"]
        and fingerprint.get("onednn_limit") == wanted["ONEDNN_MAX_CPU_ISA"]
    )


def mkl_mode() -> str | None:
    """Return how MKL chooses kernels in this process, as MKL_CBWR names it; None without MKL.

    "OFF" where it was called before anybody said how.
    """
    ask = _mkl_function("mkl_serv_cbwr_get", "MKL_CBWR_Get")
    if ask is None:
        return None
    mode = int(ask(-1))
    branch = mode & (_STRICT - 1)
    return _BRANCHES.get(branch, str(branch)) + (",STRICT" if mode & _STRICT else "")


@lru_cache(1)
def exact_by_address() -> bool:
    """Return whether products have the same bits here wherever their operands lie.

    MKL's kernels for one CPU may differ with the address modulo 16; it takes a few milliseconds to
    try 27 shapes.
    """
    return same_at_every_offset(torch.mm)


def same_at_every_offset(product: Product) -> bool:
    """Return whether products of float32 matrices at odd addresses equal those at multiples of 256.

    Args:
        product: of two matrices.
    """
    generator = torch.Generator().manual_seed(0)
    for rows, inner, outer in itertools.product(_ROWS, _INNER, _OUTER):
        left = torch.randn(rows, inner, generator=generator, dtype=torch.float32, device="cpu")
        right = torch.randn(outer, inner, generator=generator, dtype=torch.float32, device="cpu")
        aligned = product(at_offset(left, 0), at_offset(right, 0).t())
        for of_left, of_right in _OFFSETS:
            moved = product(at_offset(left, of_left), at_offset(right, of_right).t())
            if not torch.equal(moved, aligned):
                return False
    return True


def at_offset(tensor: Tensor, offset: int) -> Tensor:
    """Return a contiguous copy that lies so many bytes behind a multiple of 256."""
    nbytes = tensor.numel() * tensor.element_size()
    memory = torch.empty(nbytes + 256 + offset, dtype=torch.uint8, device="cpu")
    start = -memory.data_ptr() % 256 + offset
    storage = memory.untyped_storage()[start : start + nbytes]
    copy = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, 0, tensor.shape)  # type: ignore[call-overload]
    return copy.copy_(tensor)  # type: ignore[no-any-return]


def _processor() -> tuple[str, str]:
    """Return vendor and model of the CPU, and which instruction sets that matter it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return "unknown", ""
    facts = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    known = facts.get("flags", facts.get("Features", "")).split()
    vendor, name, *numbers = (facts.get(key, "?") for key in _PROCESSOR)
    return (
        f"{vendor} {name} ({'.'.join(numbers)})",
        " ".join(name for name in _INSTRUCTION_SETS if name in known),
    )


def _mkl_version() -> str | None:
    ask = _mkl_function("mkl_serv_get_version_string", "MKL_Get_Version_String")
    if ask is None:
        return None
    text = ctypes.create_string_buffer(256)
    ask.restype = None
    ask(text, len(text))
    version = text.value.decode(errors="replace").strip()
    found = re.search(r"Version (\d[\d.]*)", version)
    return found[1] if found else version


def _mkl_function(*names: str) -> Any:
    """Return the first of these functions that torch's libraries have, or None."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError:
        return None
    return next((getattr(loaded, name) for name in names if hasattr(loaded, name)), None)
