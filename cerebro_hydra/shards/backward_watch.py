"""Watches a forward for what changes its backward, which an exported graph does not hold."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_MODULE_HOOK = "BackwardHookFunctionBackward"


class BackwardWatch(TorchFunctionMode):
    """Notes, while it is entered, the first hook or own backward that a model's forward has.

    Attributes:
        found: what it was, in words, or None.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.found: str | None = None

    def __enter__(self) -> BackwardWatch:
        self._handle = self._model.register_forward_hook(self._look_at)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._handle.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            self.found = self.found or f"a hook on a tensor (Tensor.{func.__name__})"
        return func(*args, **(kwargs or {}))

    def _look_at(self, module: nn.Module, args: Any, outputs: Any) -> None:
        for node in _autograd_nodes(outputs):
            if isinstance(node, BackwardCFunction):
                name = type(node).__name__
                self.found = self.found or (
                    "a backward hook on a module (register_full_backward_hook)"
                    if name == _MODULE_HOOK
                    else f"the backward of torch.autograd.Function {name.removesuffix('Backward')}"
                )


def _autograd_nodes(outputs: Any) -> Iterator[Any]:
    pending = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]
