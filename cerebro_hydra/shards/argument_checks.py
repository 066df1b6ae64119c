"""Checks arguments of operators whose kernels read beyond a tensor if sizes don't fit together.

PyTorch's own modules never call them so, but a graph from a file may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

Check = Callable[..., bool]


def checked(name: str, run: Callable[..., Any], parameters: Sequence[str]) -> Callable[..., Any]:
    """Return an operator that raises ValueError before its kernel would read beyond a tensor.

    Args:
        name: of the operator, without its overload.
        parameters: the names of its arguments, in order.
    """
    check = _CHECKS.get(name)
    return run if check is None else partial(_run_checked, check, run, tuple(parameters))


def _run_checked(
    check: Check, run: Callable[..., Any], parameters: Sequence[str], *args: Any, **kwargs: Any
) -> Any:
    if not check(**dict(zip(parameters, args, strict=False)), **kwargs):
        raise ValueError("sizes or types of its arguments don't fit together")
    return run(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> bool:
    if v.dtype != g.dtype or not v.is_floating_point() or not v.numel():
        return False
    if dim == -1:
        return g.numel() == 1
    return 0 <= dim < v.dim() and g.shape == tuple(
        size if number == dim else 1 for number, size in enumerate(v.shape)
    )


def _embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False, **options: Any,
) -> bool:  # fmt: skip
    if indices.dim() != 1 or offsets.dim() != 1 or len(offsets) <= include_last_offset:
        return False
    ends = torch.cat([offsets, offsets.new_full((1,), len(indices))])
    return (
        weight.dim() == 2
        and weight.is_floating_point()
        and bool((offsets[0] == 0) & (ends.diff() >= 0).all())
        and (
            per_sample_weights is None
            or (
                per_sample_weights.shape == indices.shape
                and per_sample_weights.dtype == weight.dtype
            )
        )
    )


def _recurrent(
    gates: int, input: Tensor, hx: Tensor | Sequence[Tensor], params: Sequence[Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool,
) -> bool:  # fmt: skip
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    if len(states) != (2 if gates == 4 else 1) or any(x.dim() != 3 for x in (input, *states)):
        return False
    directions = 2 if bidirectional else 1
    cells = num_layers * directions
    out, hidden = states[0].shape[2], states[-1].shape[2]  # they differ if outputs are projected
    rows = input.shape[0 if batch_first else 1]
    shapes: list[tuple[int, ...]] = []
    for layer in range(num_layers):
        width = input.shape[2] if layer == 0 else out * directions
        cell: list[tuple[int, ...]] = [(gates * hidden, width), (gates * hidden, out)]
        cell += [(gates * hidden,)] * (2 if has_biases else 0)
        cell += [(out, hidden)] if out != hidden else []
        shapes += cell * directions
    return (
        num_layers > 0
        and min(*input.shape, out, hidden) > 0
        and all(x.is_floating_point() for x in (input, *states, *params))
        and all(tuple(x.shape[:2]) == (cells, rows) for x in states)
        and [tuple(x.shape) for x in params] == shapes
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> bool:
    return key.dim() > 1 and value.dim() > 1 and key.shape[-2] == value.shape[-2]


def _repeats(repeats: Tensor | int, **options: Any) -> bool:
    # Counts whose sum overflows would be written to a tensor that is too small.
    return not isinstance(repeats, Tensor) or float(repeats.sum(dtype=torch.float64)) < 2**62


def _upsampled(output_size: Sequence[int] | None, **given: Any) -> bool:
    # A source lies at its place divided by the scale, and must lie in the input.
    scales = [given[name] for name in _SCALES if name in given]
    if not scales or output_size is None:
        return True
    sizes = given["self"].shape[-len(scales) :]
    return len(output_size) == len(sizes) and all(
        scale is None or made <= size * scale < math.inf
        for scale, made, size in zip(scales, output_size, sizes, strict=True)
    )


_SCALES = ("scales", "scales_d", "scales_h", "scales_w")
_UPSAMPLING = """
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""

_CHECKS: dict[str, Check] = {
    "_weight_norm": _weight_norm,
    "embedding_bag": _embedding_bag,
    "lstm": partial(_recurrent, 4),
    "gru": partial(_recurrent, 3),
    "rnn_tanh": partial(_recurrent, 1),
    "rnn_relu": partial(_recurrent, 1),
    "repeat_interleave": _repeats,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(_UPSAMPLING.split(), _upsampled),
}
