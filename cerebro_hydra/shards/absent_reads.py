"""Notes operations on the values of parameters whose shard has not come to the worker."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AbsentReads(TorchDispatchMode):
    """Notes, while it is entered, the first operation that reads an absent parameter.

    Such values are NaN, which a comparison in the forward swallows, so no result tells.

    Attributes:
        found: the operation and the parameter, in words, or None.
    """

    def __init__(self, model: nn.Module) -> None:
        """Note where the values of the model lie, which all are absent now."""
        super().__init__()
        self._names = {_memory(p): name for name, p in model.named_parameters()}
        self.found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # `empty_like` and its kin read a form, and a view reads nothing.
        reads = not func.is_view and not any(each in func.name() for each in ("_like", "::new_"))
        if reads and self.found is None:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and (name := self._names.get(_memory(value))):
                    self.found = f"{func} reads parameter {name!r} before its shard has come"
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
