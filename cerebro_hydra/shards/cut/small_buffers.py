"""Small buffers hop with what trains, so that they may begin to move in any step of a trial."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MOST_OF_SMALL_BUFFER = 16 << 10
"""Bytes. What begins to move late is a counter, or a statistic of each channel: those of 4,096
channels have this size. Masks and tables of positions are larger, and never move."""

_REGISTERED = ("_parameters", "_buffers", "_modules")


def small_buffers(model: nn.Module) -> set[str]:
    """Return the small buffers of a model that checkpoints hold, by their first names.

    None of them lies in the memory of another tensor of the model, which would have to move with
    it; a segment has a buffer alone.
    """
    persistent = model.state_dict(keep_vars=True).keys()
    found = {
        name for name, buffer in model.named_buffers() if name in persistent and is_small(buffer)
    }
    end, reaching = 0, ""
    for start, stop, name in sorted(_places(model)):
        if start < end:
            found -= {name, reaching}
        if stop > end:
            end, reaching = stop, name
    return found


def in_one_memory(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[str]]:
    """Yield the names of tensors that reach into one another's memory, together."""
    together: list[str] = []
    end = 0
    for start, stop, name in sorted(_spans(tensors)):
        if start >= end:
            if len(together) > 1:
                yield together
            together = []
        together.append(name)
        end = max(end, stop)
    if len(together) > 1:
        yield together


def is_small(buffer: Tensor) -> bool:
    """Return whether a buffer has memory, and not more than a small one."""
    return 0 < buffer.nbytes <= MOST_OF_SMALL_BUFFER


def _places(model: nn.Module) -> Iterator[tuple[int, int, str]]:
    """Yield where each tensor of a model begins and ends in memory; only buffers have a name."""
    others = (("", tensor) for tensor in (*model.parameters(), *_in_attributes(model)))
    return _spans((*model.named_buffers(), *others))


def _spans(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[int, int, str]]:
    for name, tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            elements = 1 + sum((size - 1) * stride for size, stride in steps)
            start = tensor.data_ptr()
            yield start, start + elements * tensor.element_size(), name


def _in_attributes(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that modules have in attributes, and in containers there."""
    seen: set[int] = set()
    left = [
        value
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in _REGISTERED
    ]
    while left:
        value = left.pop()
        if type(value) in (Tensor, nn.Parameter):
            yield value
        elif isinstance(value, dict | list | tuple | set | deque) and id(value) not in seen:
            seen.add(id(value))
            inside: Iterable[Any] = value.values() if isinstance(value, dict) else value
            left += inside
