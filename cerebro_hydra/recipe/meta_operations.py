"""Computes what a factory computed on the meta device again, with values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_UNWRITTEN = ("aten::empty", "aten::new_empty")


class MetaOperations(TorchDispatchMode):
    """Notes, while it is entered, the operations on tensors of the meta device.

    The tables of rotary embeddings and of positions are computed, so no checkpoint needs them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self._made: dict[int, UntypedStorage] = {}  # by the memory on the meta device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if [*_on_meta((args, kwargs, result))]:
            self._noted.append((func, args, kwargs or {}, result))
        return result

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor of the meta device with its value, on the CPU.

        It is None if the value comes from random numbers, or from what was not seen.
        """
        memory = {_memory(tensor)}
        needed = []
        for operation in reversed(self._noted):
            func, args, kwargs, result = operation
            changed = (args, kwargs, result) if func._schema.is_mutable else result
            if memory.isdisjoint(map(_memory, _on_meta(changed))):
                continue
            if torch.Tag.nondeterministic_seeded in func.tags:
                return None
            memory.update(map(_memory, _on_meta((args, kwargs))))
            needed.append(operation)
        known: set[int] = set()
        for func, args, kwargs, result in reversed(needed):
            if not func._schema.name.startswith(_UNWRITTEN):
                known.update(map(_memory, _on_meta((args, kwargs, result))))
        if not memory <= known:
            return None
        for func, args, kwargs, result in reversed(needed):
            again = func(*tree_map(self._on_cpu, args), **tree_map(self._on_cpu, kwargs))
            for before, now in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(before, Tensor) and before.is_meta:
                    self._made[_memory(before)] = now.untyped_storage()
        return self._on_cpu(tensor)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Refer to no tensor any more."""
        self._noted.clear()

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "meta" else value
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        made = torch.empty(0, dtype=value.dtype)
        form = value.storage_offset(), value.shape, value.stride()
        return made.set_(self._made[_memory(value)], *form)  # type: ignore[call-overload]


def _on_meta(values: Any) -> Iterator[Tensor]:
    return (v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_meta)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
