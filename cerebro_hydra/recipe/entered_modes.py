"""Leaves modes of torch that code has entered, and has not left, in its thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as leave_function_mode
from torch.overrides import _push_mode as enter_function_mode
from torch.utils import _device as torch_device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as leave_dispatch_mode
from torch.utils._python_dispatch import _push_mode as enter_dispatch_mode

_of_autograd = torch._C._autograd


def _saved_tensors_hooks() -> Any:
    return _of_autograd._top_saved_tensors_default_hooks(True)


@dataclass(frozen=True)
class EnteredModes:
    """Holds what was entered: modes of functions and of dispatch, and hooks of saved tensors.

    All of it belongs to a thread, in which others compute later.
    """

    functions: Sequence[Any]
    dispatch: Sequence[Any]
    saved: Any
    device: Any

    @classmethod
    def now(cls) -> EnteredModes:
        """Return what is entered in this thread."""
        device = torch_device.CURRENT_DEVICE
        return cls(function_modes(), dispatch_modes(), _saved_tensors_hooks(), device)

    def give_back(self) -> list[str]:
        """Leave what was entered since, and return it in words."""
        left = _as_before(
            self.functions, function_modes(), leave_function_mode, enter_function_mode
        )
        left += _as_before(
            self.dispatch, dispatch_modes(), leave_dispatch_mode, enter_dispatch_mode
        )
        torch_device.CURRENT_DEVICE = self.device
        while (now := _saved_tensors_hooks()) is not None and now != self.saved:
            _of_autograd._pop_saved_tensors_default_hooks()
            left.append("saved_tensors_hooks")
        return left


def _as_before(
    before: Sequence[Any],
    now: Sequence[Any],
    leave: Callable[[], Any],
    enter: Callable[[Any], None],
) -> list[str]:
    """Let a stack of modes be as before; return the names of those that were entered since."""
    same = 0
    while same < min(len(before), len(now)) and before[same] is now[same]:
        same += 1
    for _ in now[same:]:
        leave()
    for mode in before[same:]:
        enter(mode)
    return [type(mode).__name__ for mode in now if all(mode is not each for each in before)]
