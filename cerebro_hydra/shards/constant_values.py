"""Knows the values of constants in a forward that is traced, so that branches on them are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

_FACTORIES = {
    torch.arange, torch.as_tensor, torch.eye, torch.full, torch.linspace, torch.logspace,
    torch.ones, torch.tensor, torch.tril_indices, torch.triu_indices, torch.zeros,
}  # fmt: skip
_READS = {
    Tensor.__bool__, Tensor.__float__, Tensor.__index__, Tensor.__int__, Tensor.item, Tensor.tolist,
    torch.equal, torch.is_nonzero,
}  # fmt: skip
_UNKNOWN: Any = object()


class ConstantValues(TorchFunctionMode):
    """Computes what a traced forward makes of constants alone, and gives values where it asks.

    A constant is a tensor that the forward makes of numbers, or an attribute that is no parameter
    and no buffer. The operations are traced too; only the question for a value is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {id(each): each._version for each in _tensors((args, kwargs))}
        values = self._evaluated(func, args, kwargs)
        if func in _READS and values is not _UNKNOWN:
            return values
        results = func(*args, **kwargs)
        if values is not _UNKNOWN:
            for written in _tensors((args, kwargs)):
                if written in self._known and written._version != before[id(written)]:
                    self._follow(written, before[id(written)])
            for tensor, value in zip(_tensors(results), _tensors(values), strict=True):
                if type(tensor) is not Tensor:
                    self._known[tensor] = (value, tensor._version)
        return results

    def _follow(self, written: Tensor, before: int) -> None:
        """Go on knowing all tensors that share the memory of one which was written to."""
        memory = self._known[written][0].untyped_storage().data_ptr()
        for tensor, (value, version) in list(self._known.items()):
            if version == before and value.untyped_storage().data_ptr() == memory:
                self._known[tensor] = (value, written._version)

    def _evaluated(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what a function gives for constants, unless it takes or draws anything else."""
        given = tree_leaves((args, kwargs))
        tensors = _tensors(given)
        if not tensors and func not in _FACTORIES:
            return _UNKNOWN
        if any(isinstance(each, torch.SymInt | torch.SymFloat | torch.SymBool) for each in given):
            return _UNKNOWN
        if any(self._value(each) is None for each in tensors):
            return _UNKNOWN
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, self._value, (args, kwargs))
            before = torch.get_rng_state()
            try:
                values = func(*args, **kwargs)
            except Exception:
                return _UNKNOWN
            if not torch.equal(torch.get_rng_state(), before):
                torch.set_rng_state(before)
                return _UNKNOWN
        return values

    def _value(self, tensor: Tensor) -> Tensor | None:
        if type(tensor) is Tensor:
            return tensor.clone()  # the forward writes into its own, if at all
        value, version = self._known.get(tensor, (None, None))
        return value if version == tensor._version else None


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
