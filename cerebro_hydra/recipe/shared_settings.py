"""Keeps what all trials of a process share.

That is settings of torch on which bits depend, its modes, hooks for all modules, and limits.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.optim import optimizer as torch_optimizer
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as leave_function_mode
from torch.overrides import _push_mode as enter_function_mode
from torch.utils import _device as torch_device
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as leave_dispatch_mode
from torch.utils._python_dispatch import _push_mode as enter_dispatch_mode

from cerebro_hydra.errors import Cancelled, ConfigurationError

_of_autograd = torch._C._autograd
_SUBNORMAL, _ONE = np.float32(1e-39), np.float32(1.0)
_IN_OLDER_WORDS: dict[tuple[str, ...], str] = {
    ("ieee", "ieee"): "highest", ("tf32", "tf32"): "high", ("tf32", "bf16"): "medium",
}  # fmt: skip


def _default_device() -> torch.device | None:
    # What torch.get_default_device() makes a tensor for, which takes longer than all others here.
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _matmul_backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _matmul_precision() -> tuple[str, ...]:
    # torch.get_float32_matmul_precision() raises where they were set one by one.
    return tuple(each.fp32_precision.replace("none", "ieee") for each in _matmul_backends())


def _set_matmul_precision(value: tuple[str, ...]) -> None:
    torch.set_float32_matmul_precision(_IN_OLDER_WORDS.get(value, "highest"))
    if value not in _IN_OLDER_WORDS:
        for each, precision in zip(_matmul_backends(), value, strict=True):
            each.fp32_precision = precision


_inference_modes: list[torch.inference_mode] = []  # that end whoever's was left entered


def _set_inference_mode(value: bool) -> None:
    mode = torch.inference_mode(value)
    mode.__enter__()
    _inference_modes.append(mode)


def _flushes_subnormals() -> bool:
    return not _SUBNORMAL * _ONE


_AUTOCAST_DEVICES = ("cpu", "cuda")


def _enabled_autocast() -> list[str]:
    return [each for each in _AUTOCAST_DEVICES if torch.is_autocast_enabled(each)]


def _enable_autocast(devices: list[str]) -> None:
    for each in _AUTOCAST_DEVICES:
        torch.set_autocast_enabled(each, each in devices)


def _autocast_nesting() -> int:
    inner = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return inner - 1


def _set_autocast_nesting(value: int) -> None:
    while _autocast_nesting() > value:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < value:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()  # which torch does at the end of the outermost one


def _set_cached(value: int) -> None:
    parametrize._cache_enabled = value
    parametrize._cache.clear()


def _forbid_saved_tensors_hooks(message: str | None) -> None:
    if message is None:
        _of_autograd._saved_tensors_hooks_enable()
    else:
        _of_autograd._saved_tensors_hooks_disable(message)


_THREADS = "set_num_threads"
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "set_default_device": (_default_device, torch.set_default_device),
    "use_deterministic_algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "set_float32_matmul_precision": (_matmul_precision, _set_matmul_precision),
    "inference_mode": (torch.is_inference_mode_enabled, _set_inference_mode),  # sets the next one
    "set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    _THREADS: (torch.get_num_threads, torch.set_num_threads),
    "autocast": (_autocast_nesting, _set_autocast_nesting),
    "set_autocast_enabled": (_enabled_autocast, _enable_autocast),
    "set_autocast_cache_enabled": (
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
    ),
    "set_autocast_dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda value: torch.set_autocast_dtype("cpu", value),
    ),
    "nn.utils.parametrize.cached": (lambda: parametrize._cache_enabled, _set_cached),
    "autograd.graph.disable_saved_tensors_hooks": (
        _of_autograd._saved_tensors_hooks_get_disabled_error_message,
        _forbid_saved_tensors_hooks,
    ),
    "backends.mkldnn.enabled": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "backends.mkldnn.deterministic": (
        lambda: torch._C._get_mkldnn_deterministic(),
        lambda value: torch._C._set_mkldnn_deterministic(value),
    ),
    # Which kernels attention may take, on CPUs, too.
    "backends.cuda.enable_flash_sdp": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
    ),
    "backends.cuda.enable_math_sdp": (
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.enable_math_sdp,
    ),
    "backends.cuda.enable_mem_efficient_sdp": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "set_flush_denormal": (_flushes_subnormals, torch.set_flush_denormal),
}
"""The function of torch that sets each, with what reads and what writes it."""


_LIMITS = {
    f"RLIMIT_{name}": getattr(resource, f"RLIMIT_{name}")
    for name in ("NOFILE", "NPROC", "AS", "DATA", "FSIZE", "CPU")
    if hasattr(resource, f"RLIMIT_{name}")
}
"""What the process may have, which a trial must not take from others."""


_HOOKS: dict[str, dict[int, Any]] = {
    name: each
    for name, each in {**vars(torch_module), **vars(torch_optimizer)}.items()
    if name.startswith("_global_") and isinstance(each, dict)
}
"""What torch knows of hooks for all modules, and for all optimizers, by the number of a hook."""

_MODES = "modes"
_DEPTH = "sys.setrecursionlimit"

_HOOKS_ARE_FULL = "_global_is_full_backward_hook"
"""Where torch notes of which kind the first backward hook was, for it allows no other."""


def _read_all() -> dict[str, Any]:
    limits = {name: resource.getrlimit(kind) for name, kind in _LIMITS.items()}
    hooks = {name: dict(each) for name, each in _HOOKS.items()}
    hooks[_HOOKS_ARE_FULL] = getattr(torch_module, _HOOKS_ARE_FULL)
    others = {_MODES: _EnteredModes.now(), _DEPTH: sys.getrecursionlimit()}
    return {name: read() for name, (read, _) in _SETTINGS.items()} | limits | hooks | others


def _is_lower(limit: int, than: int) -> bool:
    return limit != resource.RLIM_INFINITY and (than == resource.RLIM_INFINITY or limit < than)


def lowered_for_good() -> Callable[[], str | None]:
    """Return what names a hard limit that is lower than now; it comes back for nobody but root."""
    before = {name: resource.getrlimit(kind)[1] for name, kind in _LIMITS.items()}

    def lowered() -> str | None:
        for name, kind in _LIMITS.items():
            if _is_lower(resource.getrlimit(kind)[1], before[name]):
                return name
        return None

    return lowered


@contextmanager
def shared_settings_kept(who: str = "code of the trial") -> Iterator[None]:
    """Give the settings back after the body, which must leave them, and raise limits at most.

    Args:
        who: the subject of the sentence that tells of a change.

    Raises:
        ConfigurationError: the body changed one. An error of the body's own gets a note of it.
    """
    before = _read_all()
    try:
        yield
    except Cancelled:  # in the middle of the trial's code, which might have given them back
        _give_back(before, who)
        raise
    except BaseException as error:
        if change := _give_back(before, who):
            error.add_note(change)
        raise
    if change := _give_back(before, who):
        raise ConfigurationError(change)


def _give_back(before: dict[str, Any], who: str) -> str | None:
    changes = []
    instead = "set it at the top of the factory's module, for all trials, or set it back at once"
    for name, (read, write) in _SETTINGS.items():
        if (now := read()) != before[name]:
            write(before[name])
            if name == _THREADS:
                instead = "leave it out, and give the backend threads_per_worker"
            changes.append(f"torch.{name} (from {before[name]} to {now})")
    for name, kind in _LIMITS.items():
        now, was = resource.getrlimit(kind)[0], before[name][0]
        if _is_lower(now, was):
            with suppress(ValueError):  # a hard limit comes back for administrators alone
                resource.setrlimit(kind, before[name])
            changes.append(f"resource.{name} (from {was} to {now})")
    if (deepest := sys.getrecursionlimit()) < before[_DEPTH]:
        sys.setrecursionlimit(before[_DEPTH])
        changes.append(f"{_DEPTH} (from {before[_DEPTH]} to {deepest})")
    told = []
    if changes:
        told.append(
            f"{who} changes {', '.join(changes)}, which other trials of the process would have, "
            f"too; {instead}"
        )
    if hooks := _give_hooks_back(before):
        told.append(
            f"{who} {' and '.join(hooks)} of the process, which other trials would have, too; "
            "register it on the modules of its model, or on its optimizer"
        )
    if modes := before[_MODES].give_back():
        told.append(
            f"{who} enters {' and '.join(modes)} and does not leave it, so that other trials in "
            "its thread would compute within it; enter it in a with statement"
        )
    return "; ".join(told) or None


def _give_hooks_back(before: dict[str, Any]) -> list[str]:
    changes = []
    for name, each in _HOOKS.items():
        if each.keys() == before[name].keys():
            continue
        verb = "registers" if each.keys() - before[name].keys() else "takes away"
        each.clear()
        each.update(before[name])
        if name.endswith("_hooks"):  # else it says more of one of them
            kind = name.removeprefix("_global_").removesuffix("s").replace("_", " ")
            of = "optimizers" if name in vars(torch_optimizer) else "modules"
            changes.append(f"{verb} a {kind.removeprefix('optimizer ')} for all {of}")
    setattr(torch_module, _HOOKS_ARE_FULL, before[_HOOKS_ARE_FULL])
    return changes


def _saved_tensors_hooks() -> Any:
    return _of_autograd._top_saved_tensors_default_hooks(True)


@dataclass(frozen=True)
class _EnteredModes:
    """Holds what was entered: modes of functions and of dispatch, and hooks of saved tensors.

    All of it belongs to a thread, in which others compute later.
    """

    functions: Sequence[Any]
    dispatch: Sequence[Any]
    saved: Any
    device: Any

    @classmethod
    def now(cls) -> _EnteredModes:
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
