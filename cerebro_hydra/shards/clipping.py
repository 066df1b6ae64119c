"""Clips gradients shard by shard, with the bits of `clip_grad_norm_` and `clip_grad_value_`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


def grad_norms(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the 2-norm of each gradient that exists."""
    norms: dict[str, Tensor] = {}
    for grads in _grads_by_dtype(params):
        norms |= zip(grads, torch._foreach_norm([*grads.values()], 2.0), strict=True)
    return norms


def floats(norms: Mapping[str, Tensor]) -> dict[str, float]:
    """Return norms as numbers of Python, for which a device is waited for once."""
    if not norms:
        return {}
    values = torch.stack([norm.double() for norm in norms.values()]).tolist()
    return dict(zip(norms, values, strict=True))


def clip_coefficient(norms: Mapping[str, Tensor], order: Sequence[str], limit: float) -> Tensor:
    """Return the factor for every gradient that brings the total norm down to `limit`.

    Args:
        norms: the norms of all shards together.
        order: every parameter's name in `model.parameters()` order, on which the sum depends.
    """
    present = [norms[name] for name in order if name in norms]
    if not present:
        return torch.tensor(1.0)
    # Gradients of several dtypes are summed dtype by dtype, in an order that only torch defines.
    groups = _group_tensors_by_device_and_dtype([present])  # type: ignore[list-item]
    ordered = [
        norm for (of_a_dtype, *_), _ in groups.values() for norm in of_a_dtype if norm is not None
    ]
    device = present[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in ordered]), 2.0)
    return torch.clamp(limit / (total + 1e-6), max=1.0)


def scale_grads(params: Mapping[str, Tensor], coefficient: Tensor) -> None:
    """Multiply every gradient by the coefficient."""
    for grads in _grads_by_dtype(params):
        torch._foreach_mul_([*grads.values()], coefficient)


def _grads_by_dtype(params: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    groups: dict[torch.dtype, dict[str, Tensor]] = {}
    for name, parameter in params.items():
        if parameter.grad is not None:
            groups.setdefault(parameter.grad.dtype, {})[name] = parameter.grad
    return list(groups.values())
