"""Moves the operands of every operation to odd addresses: bits must not depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.numerics import at_offset

_OFFSETS = (4, 8, 12, 20, 28, 36, 44, 52)
_WRITTEN_UNTOLD = {"running_mean", "running_var"}
"""What batch norm writes to without its schema saying so."""


class OddAddresses(TorchDispatchMode):
    """Gives each operation copies of what it reads, a few bytes behind a multiple of 256.

    It also sees the operations of backward and of the optimizer. What an operation writes to stays
    where it is, see `move_state`; so does what a view is made of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0
        """How many operands were moved."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns):
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        names = [argument.name for argument in arguments]
        written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
        written |= _WRITTEN_UNTOLD
        moved = [
            arg if name in written else self._moved(arg)
            for name, arg in zip(names, args, strict=False)
        ]
        others = {k: v if k in written else self._moved(v) for k, v in kwargs.items()}
        return func(*moved, **others)

    def _moved(self, argument: Any) -> Any:
        return tree_map_only(Tensor, self._at_odd_address, argument)

    def _at_odd_address(self, tensor: Tensor) -> Tensor:
        if not _can_move(tensor):
            return tensor
        self.moved += 1
        return _copy(tensor, self.moved)


def move_state(recipe: Recipe) -> None:
    """Move parameters, buffers and the optimizer's state to odd addresses."""
    for number, tensor in enumerate((*recipe.model.parameters(), *recipe.model.buffers())):
        if _can_move(tensor.data):
            tensor.data = _copy(tensor.data, number)
    for number, state in enumerate(recipe.optimizer.state.values()):
        for key, value in state.items():
            if isinstance(value, Tensor) and _can_move(value):
                state[key] = _copy(value, number)


def _can_move(tensor: Tensor) -> bool:
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return plain and tensor.is_floating_point() and tensor.dim() > 0 and tensor.numel() > 0


def _copy(tensor: Tensor, number: int) -> Tensor:
    """Return a copy of the same strides at the address of that number."""
    reached = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    size = tensor.element_size()
    offset = _OFFSETS[number % len(_OFFSETS)] // size * size or size
    memory = at_offset(tensor.as_strided((reached,), (1,)), offset)
    return memory.as_strided(tensor.shape, tensor.stride())
