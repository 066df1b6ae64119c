"""Lays out the gradients of a shard, for the time in which its state may leave a device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.shards.layout import ALIGNMENT, LayoutEntry, Memory, ShardLayout


@dataclass(frozen=True)
class GradientLayout:
    """Describes memory with a mark for each parameter that trains, and room for its gradient.

    A mark is 0 where there is no gradient, so zeroed memory has none.
    """

    entries: tuple[LayoutEntry, ...]
    nbytes: int

    @classmethod
    def of(cls, shard: ShardLayout) -> GradientLayout:
        """Lay out the gradients of a shard."""
        params = [e for e in shard.trainable.entries if e.name.startswith("param:")]
        at = _up(len(params))
        entries = []
        for entry in params:
            entries.append(replace(entry, name=entry.name.partition(":")[2], offset=at))
            at += _up(entry.nbytes)
        return cls(tuple(entries), at)

    def load(self, memory: Memory, params: Mapping[str, nn.Parameter]) -> None:
        """Let the gradients in the memory be those of the parameters.

        A gradient that a parameter has already came later and is added, as autograd would.
        """
        marks = memory[: len(self.entries)].tolist()
        for entry in itertools.compress(self.entries, marks):
            parameter, gradient = params[entry.name], entry.view(memory)
            if parameter.grad is not None:
                gradient.add_(parameter.grad)
            parameter.grad = gradient

    def store(self, memory: Memory | None, params: Mapping[str, nn.Parameter]) -> None:
        """Move the gradients of the parameters into the memory.

        Raises:
            ConfigurationError: a gradient is sparse.
            ValueError: there are gradients, but no memory.
        """
        marks = torch.zeros(len(self.entries), dtype=torch.uint8)
        for number, entry in enumerate(self.entries):
            parameter = params[entry.name]
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                memory = _fitting(entry, gradient, memory)
                marks[number] = 1
                if gradient.data_ptr() != memory.data_ptr() + entry.offset:
                    entry.view(memory).copy_(gradient)
        if memory is not None:
            memory[: len(self.entries)] = marks


def _fitting(entry: LayoutEntry, gradient: Tensor, memory: Memory | None) -> Memory:
    """Return the memory that a gradient can be moved into."""
    if gradient.is_sparse:
        raise ConfigurationError(
            f"the gradient of parameter {entry.name!r} is sparse and can't leave a device; set "
            "sparse=False in its embedding"
        )
    if memory is None:
        raise ValueError(
            f"parameter {entry.name!r} has a gradient when its shard leaves the device; give "
            "memory for gradients"
        )
    return memory


def _up(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT
