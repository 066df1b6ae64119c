"""A record says where in DRAM the values of a pass lie between two units.

Whoever does the next unit reads there what the unit needs, and writes what is new behind it. So the
memory has all that a microbatch left since its begin, and a unit that is done again begins with the
record before it, and writes the same bytes to the same place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cerebro_hydra.plan.human_units import bytes_text
from cerebro_hydra.shards.engine.graph_tasks import GraphPass
from cerebro_hydra.shards.engine.layout import ALIGNMENT, Memory
from cerebro_hydra.shards.engine.sub_epoch import Norms

Key = tuple[str, int | str]
"""Names a tensor of a pass: its kind, and its name or number."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Says where in memory the elements of a tensor lie, with the strides that it had."""

    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, at: int) -> StoredTensor:
        """Return what is to be stored there."""
        shape, strides = tuple(tensor.shape), tensor.stride()
        return cls(at, tensor.dtype, shape, strides, tensor.requires_grad)

    @property
    def elements(self) -> int:
        """Return how many there are from the first one to the last one in memory."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    @property
    def end(self) -> int:
        """Return where in memory the tensor ends."""
        return self.at + self.elements * self.dtype.itemsize

    def write(self, tensor: Tensor, memory: Memory) -> None:
        """Store a tensor of this form."""
        flat = tensor.detach().as_strided((self.elements,), (1,), tensor.storage_offset())
        self._flat(memory).copy_(flat)

    def read(self, memory: Memory, device: torch.device) -> Tensor:
        """Return the tensor, which is a view of the memory if that is the device's."""
        flat = self._flat(memory).data.to(device)  # autograd tells its writes from those to others
        return flat.as_strided(self.shape, self.strides).requires_grad_(self.requires_grad)

    def _flat(self, memory: Memory) -> Tensor:
        return memory[self.at : self.end].view(self.dtype)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Describes a microbatch between two units.

    Args:
        nbytes: of memory that has been written since the microbatch began.
        tensors: where each lies.
        others: values that are no tensors, by name.
        needs_grad: the values that get a gradient.
        rows: of the batch.
        weight: of its loss; see `Microbatch`.
        loss: of the batch, once it is known.
        norms: the norms of the gradients of shards, where a backward has been.
    """

    nbytes: int = 0
    tensors: Mapping[Key, StoredTensor] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    needs_grad: frozenset[str] = frozenset()
    rows: int = 0
    weight: float | None = None
    loss: float = float("nan")
    norms: Mapping[int, Norms] = field(default_factory=dict)


class TensorLog:
    """Lays tensors out one behind the other; those that were laid out before stay where they are.

    Args:
        stored: what lies in memory by now.
        nbytes: of memory that was written.
    """

    def __init__(self, stored: Mapping[Key, StoredTensor], nbytes: int) -> None:
        self.stored = dict(stored)
        self.nbytes = nbytes
        self._known: dict[Key, tuple[object, ...]] = {}  # the tensors that were read or laid out

    def read(self, key: Key, memory: Memory, device: torch.device) -> Tensor:
        """Return a tensor that lies in memory."""
        tensor = self.stored[key].read(memory, device)
        self._known[key] = _identity(tensor)
        return tensor

    def lay_out(self, tensors: Mapping[Key, Tensor]) -> list[tuple[Tensor, StoredTensor]]:
        """Return which of the tensors are new, and where they are to be stored.

        What was read or laid out and is not among them any more is forgotten.
        """
        for key in self._known.keys() - tensors.keys():
            del self._known[key], self.stored[key]
        new = []
        for key, tensor in tensors.items():
            identity = _identity(tensor)
            if self._known.get(key) != identity:
                self._known[key] = identity
                place = self.stored[key] = StoredTensor.of(tensor, self.nbytes)
                self.nbytes = place.end + -place.end % ALIGNMENT
                new.append((tensor, place))
        return new


def check_room(nbytes: int, memory: int) -> None:
    """Check that what a microbatch leaves between its units fits into the memory for it.

    Raises:
        MemoryError: it does not.
    """
    if nbytes > memory:
        raise MemoryError(
            f"a batch leaves {bytes_text(nbytes)} between its shards, and it may leave "
            f"{bytes_text(memory)}, by the largest batch of the first rows; let collate limit the "
            "size of a batch, or use smaller microbatches"
        )


def tensors_of(going: GraphPass, held: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """Return the tensors of a pass by what they are, with what is held for it."""
    batch = going.batch
    found: dict[Key, Tensor] = {("feature", n): t for n, t in enumerate(batch.features)}
    found |= {("target", n): t for n, t in enumerate(batch.targets)}
    # Sets of names have another order in another process, which may do a unit again.
    found |= {("held", name): held[name] for name in sorted(held)}
    found |= {("value", n): v for n, v in going.values.items() if isinstance(v, Tensor)}
    for buffers in going.buffers_before.values():
        found |= {("before", name): buffers[name] for name in sorted(buffers)}
    found |= {("gradient", name): t for name, t in going.grads.items()}
    return found | {("tied", name): t for name, t in going.tied_grads.items()}


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
