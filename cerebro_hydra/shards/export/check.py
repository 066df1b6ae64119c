"""Compares an exported graph with its model, and says what a difference comes from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Recipe, exact_by_address
from cerebro_hydra.shards.cut.export import first_line
from cerebro_hydra.shards.engine.differences import same_bits
from cerebro_hydra.shards.export.tensors import placed

_TORCH_ALIGNMENT = 64
"""Where torch allocates tensors; no kernel of the CPU looks further."""

Outputs = tuple[Tensor, ...]


def difference(
    recipe: Recipe,
    module: Callable[..., Outputs],
    loaded: Callable[..., Outputs],
    batch: Sequence[Tensor],
) -> str | None:
    """Return why a graph is not its model for a batch, or None if it gives the same bits.

    Where bits depend on addresses, a warning tells of what is within rounding.

    Args:
        module: the model, as it evaluates.
        loaded: the graph, from its files.
    """
    rows = len(batch[0])
    try:
        with _aligned(recipe.model), recipe.precision():
            expected = module(*map(_own, batch))
            again = module(*map(_own, batch))
    except Exception as error:
        return f"its forward fails on {rows} rows after it was traced ({first_line(error)})"
    try:
        found = loaded(*map(_own, batch))
    except Exception as error:
        return f"its graph does not run on {rows} rows ({first_line(error)})"
    if _same(found, expected):
        return None
    if not _same(again, expected):
        return (
            f"its forward gives other bits each time for {rows} rows{_by(again, expected)}; look "
            "for random numbers and for state that it changes in evaluation"
        )
    told = f"its graph gives other bits than the model for {rows} rows{_by(found, expected)}"
    if not _within_rounding(found, expected):
        return f"{told}; look for values or sizes that its forward reads in Python"
    if exact_by_address():
        return f"{told}; look for code that takes other operations where it is traced"
    warnings.warn(
        f"{type(recipe.model).__name__} is saved, but {told}, because products depend on addresses "
        "in this process; set MKL_CBWR=AUTO,STRICT in its environment to have equal bits",
        stacklevel=3,
    )
    return None


def _own(feature: Tensor) -> Tensor:
    """Return an aligned copy of a feature."""
    copy = feature.clone()
    return placed(copy, copy.stride())


@contextmanager
def _aligned(model: nn.Module) -> Iterator[None]:
    """Let parameters and buffers lie where torch allocates, if they do not."""
    moved = []
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % _TORCH_ALIGNMENT:
            moved.append((tensor, tensor.data))
            tensor.data = tensor.detach().clone(memory_format=torch.preserve_format)
    try:
        yield
    finally:
        for tensor, data in moved:
            tensor.data = data


def _same(found: Outputs, expected: Outputs) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def _by(found: Outputs, expected: Outputs) -> str:
    """Return how far predictions are apart, in words; nothing if they have other forms."""
    if any(a.dtype != b.dtype or a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return ""
    most, number = max(
        (_largest(a, b), number) for number, (a, b) in enumerate(zip(found, expected, strict=True))
    )
    return f", by {most:.1e} where they are up to {_size(expected[number]):.1e}"


def _within_rounding(found: Outputs, expected: Outputs) -> bool:
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and (same_bits(a, b) or _largest(a, b) <= _tolerance(b.dtype) * _size(b))
        for a, b in zip(found, expected, strict=True)
    )


def beyond(found: Outputs, expected: Outputs, tolerance: float) -> str | None:
    """Return in words how far predictions are apart; None if they are within the tolerance.

    Args:
        tolerance: relative to the largest prediction.
    """
    forms = [[(tensor.dtype, tensor.shape) for tensor in each] for each in (found, expected)]
    if forms[0] != forms[1]:
        return f", of the forms {forms[0]} in place of {forms[1]}"
    within = all(
        _largest(a, b) <= tolerance * _size(b) for a, b in zip(found, expected, strict=True)
    )
    return None if within else _by(found, expected)


def _largest(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors of one form; infinite if one is no number."""
    one, other = _wide(one), _wide(other)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, 0.0, (one - other).abs())
    return float(apart.nan_to_num(nan=torch.inf).max()) if apart.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in a type that has every operation."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _size(tensor: Tensor) -> float:
    wide = _wide(tensor)
    finite = wide[wide.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    """Return how far rounding may lead, relative to the largest prediction."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return torch.finfo(dtype).eps * (128 if dtype.itemsize >= 4 else 4)
