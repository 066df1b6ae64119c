"""Writes tensors to a safetensors file, and reads them, at multiples of `ALIGNMENT`.

Kernels may round otherwise on other addresses. As in a segment, `pad:N` fills the gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from cerebro_hydra.shards.engine.layout import (
    ALIGNMENT,
    DTYPE_NAMES,
    aligned,
    contiguous_strides,
    is_padding,
    segment_of,
)

_DTYPE_NAMES = DTYPE_NAMES | {
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What an archive may hold beside what can be trained."""


class NotTheTensors(Exception):
    """A file does not hold the tensors that it should."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in their order; in the file each is contiguous.

    Raises:
        ConfigurationError: safetensors lacks a tensor's type.
    """
    forms = (
        (name, tensor.dtype, tuple(tensor.shape), contiguous_strides(tuple(tensor.shape)))
        for name, tensor in tensors.items()
    )
    layout = segment_of(forms, _DTYPE_NAMES)
    with open(path, "wb") as file:
        file.write(layout.header)
        for entry in layout.entries:
            file.write(bytes(entry.offset - file.tell()))
            plain = tensors[entry.name].detach().resolve_conj().resolve_neg()
            flat = plain.contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        file.write(bytes(layout.nbytes - file.tell()))


def read_tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the tensors of a file, which must be these; they are mapped, not copied.

    Raises:
        NotTheTensors: it holds others, or is no safetensors file.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            held = [name for name in file.keys() if not is_padding(name)]  # noqa: SIM118
            if sorted(held) != sorted(names):
                raise NotTheTensors(f"{path.name} does not hold the tensors of its graph")
            return {name: file.get_tensor(name) for name in held}
    except (safetensors.SafetensorError, TypeError, AttributeError) as error:
        raise NotTheTensors(f"{path.name} is no safetensors file: {error}") from error


def placed(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a tensor of these dense strides at an aligned address, a copy if it is none."""
    if tensor.stride() == tuple(strides) and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    memory = torch.from_numpy(aligned(tensor.nbytes)).view(tensor.dtype)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)
