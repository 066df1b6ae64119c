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
_REPEATS = {Tensor.expand, torch.broadcast_to}
"""Functions that repeat the same values as often as a size says."""
_UNKNOWN: Any = object()


class ConstantValues(TorchFunctionMode):
    """Computes what a traced forward makes of constants alone, and gives values where it asks.

    A constant is a tensor that the forward makes of numbers, or an attribute that is no parameter
    and no buffer. The operations are traced too; only the question for a value is not. Constants
    may be repeated as often as a size says that differs between batches, such as the number of
    rows. What is made of them is known as long as it is the same for the sample's size and for one
    more, or repeats the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = (_Known(0), _Known(1))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {id(each): each._version for each in _tensors((args, kwargs))}
        found = [known.evaluated(func, args, kwargs) for known in self._known]
        agree = not any(each is _UNKNOWN for each in found) and _agree(*found)
        if agree and func in _READS:
            return found[0]
        results = func(*args, **kwargs)
        if agree:
            for known, values in zip(self._known, found, strict=True):
                known.note(results, values, _tensors((args, kwargs)), before)
        return results


class _Known:
    """Holds the values of constants where each size that differs between batches is one number.

    It is the sample's, and so many more.
    """

    def __init__(self, more: int) -> None:
        self._more = more
        self._values: Any = WeakTensorKeyDictionary()

    def note(
        self, results: Any, values: Any, given: list[Tensor], before: Mapping[int, int]
    ) -> None:
        """Keep the values of results, and of what was written to.

        Args:
            before: the version that each given tensor had.
        """
        for written in given:
            if written in self._values and written._version != before[id(written)]:
                self._follow(written, before[id(written)])
        for tensor, value in zip(_tensors(results), _tensors(values), strict=True):
            if type(tensor) is not Tensor:
                self._values[tensor] = (value, tensor._version)

    def _follow(self, written: Tensor, before: int) -> None:
        """Go on knowing all tensors that share the memory of one which was written to."""
        memory = self._values[written][0].untyped_storage().data_ptr()
        for tensor, (value, version) in list(self._values.items()):
            if version == before and value.untyped_storage().data_ptr() == memory:
                self._values[tensor] = (value, written._version)

    def evaluated(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return what a function gives for constants, unless it takes or draws anything else."""
        given = tree_leaves((args, kwargs))
        tensors = _tensors(given)
        if not tensors and func not in _FACTORIES:
            return _UNKNOWN
        if func in _REPEATS:
            args, kwargs = tree_map_only(torch.SymInt, self._size, (args, kwargs))
            given = tree_leaves((args, kwargs))
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

    def _size(self, size: torch.SymInt) -> int | torch.SymInt:
        """Return a size as a number, unless it depends on values."""
        return size if size.node.hint is None else size.node.hint + self._more

    def _value(self, tensor: Tensor) -> Tensor | None:
        if type(tensor) is Tensor:
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return None  # of torch.vmap, around one that is traced
            return tensor.clone()  # the forward writes into its own, if at all
        value, version = self._values.get(tensor, (None, None))
        return value if version == tensor._version else None


def _agree(one: Any, more: Any) -> bool:
    """Tell whether values are the same for both sizes, or repeat the same as often as they say."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        ours, theirs = _tensors(one), _tensors(more)
        if len(ours) != len(theirs):
            return False
        pairs = zip(ours, theirs, strict=True)
        if not all(_same(_once(a, b), _once(b, a)) for a, b in pairs):
            return False
        if _tensors(one):
            return True
        return repr(one) == repr(more)


def _once(tensor: Tensor, other: Tensor) -> Tensor | None:
    """Return a tensor without the repetitions along each dimension in which another is longer."""
    if tensor.dim() != other.dim():
        return None
    for dim, size in enumerate(other.shape):
        if tensor.shape[dim] != size:
            first = tensor.narrow(dim, 0, 1)
            if not _same(first.expand_as(tensor), tensor):
                return None
            tensor = first
    return tensor


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]
