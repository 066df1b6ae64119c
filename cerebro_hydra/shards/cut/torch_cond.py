"""Watches operations beside compiled code, and knows torch.cond, whose branches torch compiles."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from cerebro_hydra.foreign_text import named_error_text, traceback_of


class Watch(TorchDispatchMode):
    """Watches operations while it is entered, such as to count the bytes of tensors.

    What is compiled runs so, and unseen, such as the branches of torch.cond.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run; torch would run it uncompiled for good, with other bits."""
        return True


def is_cond(operation: object) -> bool:
    """Return whether an operation is torch.cond, whose branches are not seen."""
    return isinstance(operation, HigherOrderOperator) and operation.name() == "cond"


def is_of_cond(error: Exception) -> bool:
    """Tell whether torch.cond raised an error."""
    frames = traceback.walk_tb(traceback_of(error))
    names = {frame.f_code.co_filename.replace("\\", "/") for frame, _ in frames}
    return any(name.endswith("torch/_higher_order_ops/cond.py") for name in names)


def cond_failed(error: Exception, when: str) -> str:
    """Say when torch.cond failed, and with what error."""
    said = named_error_text(error).partition("\n")[0]
    return f"torch.cond of the forward failed {when} ({said})"


def leave_cond() -> None:
    """Let torch compile again, which it does nothing of the kind after torch.cond has failed."""
    torch._dynamo.reset()


@contextmanager
def plain_branches(taken: bool | None = None) -> Iterator[None]:
    """Let torch.cond call a branch as Python's `if` would, which can be watched, for a while.

    Args:
        taken: which branch is called, whatever the condition says; None leaves that to it.
    """

    def cond(
        pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any],
        operands: Sequence[Any] = (),
    ) -> Any:  # fmt: skip
        return (true_fn if (bool(pred) if taken is None else taken) else false_fn)(*operands)

    own = torch.cond
    torch.cond = cond  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cond = own
