"""Clipping by the global norm, shard by shard, with the bits of `clip_grad_norm_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def grad_norms(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The 2-norm of each gradient that exists."""
    with_grad = {name: p.grad for name, p in params.items() if p.grad is not None}
    norms: dict[str, Tensor] = {}
    for names in _by_dtype(with_grad).values():
        norms |= zip(names, torch._foreach_norm([with_grad[n] for n in names], 2.0), strict=True)
    return norms


def clip_coefficient(norms: Mapping[str, Tensor], order: Sequence[str], limit: float) -> Tensor:
    """What every gradient is multiplied by.

    Args:
        norms: of all shards together.
        order: every parameter's name in `model.parameters()` order: the sum depends on it.
    """
    present = {name: norms[name] for name in order if name in norms}
    if not present:
        return torch.tensor(1.0)
    grouped = [n for names in _by_dtype(present).values() for n in names]
    device = present[grouped[0]].device
    total = torch.linalg.vector_norm(torch.stack([present[n].to(device) for n in grouped]), 2.0)
    return torch.clamp(limit / (total + 1e-6), max=1.0)


def scale_grads(params: Mapping[str, Tensor], coefficient: Tensor) -> None:
    grads = {name: p.grad for name, p in params.items() if p.grad is not None}
    for names in _by_dtype(grads).values():
        torch._foreach_mul_([grads[n] for n in names], coefficient)


def _by_dtype(tensors: Mapping[str, Tensor]) -> dict[torch.dtype, list[str]]:
    """Names by type, in the order in which types occur, as torch groups them."""
    groups: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.dtype, []).append(name)
    return groups
