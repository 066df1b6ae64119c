"""Settings and limits that trials of a process share stay as they are; who changes one is told."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from copy import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cerebro_hydra.errors import Cancelled, ConfigurationError
from cerebro_hydra.recipe import Columns, Recipe, build_recipe
from cerebro_hydra.recipe.shared_settings import shared_settings_kept
from tests.recipe.small_recipes import recipe_of


def autocast_keeps_weights() -> bool:
    """Return whether weights that autocast has cast are used again after its block."""
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu"):
        torch.nn.functional.linear(torch.ones(1, 1), weight)
    with torch.no_grad():
        weight.fill_(2)
    with torch.autocast("cpu"):
        return torch.nn.functional.linear(torch.ones(1, 1), weight).item() == 1


def saves_tensors() -> bool:
    """Return whether hooks of saved tensors are allowed."""
    with suppress(RuntimeError), torch.autograd.graph.save_on_cpu():
        return True
    return False


def seen() -> tuple[Any, ...]:
    """Return what tensors show of the settings."""
    tiny = torch.tensor(1e-39, dtype=torch.float32) * torch.tensor(1.0, dtype=torch.float32)
    made = torch.ones(1, requires_grad=True) * 2
    return (
        made.dtype, made.device, made.requires_grad, bool(tiny != 0),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        torch.get_num_threads(), torch.is_autocast_enabled("cpu"), torch._C._get_mkldnn_enabled(),
        autocast_keeps_weights(), torch.get_autocast_dtype("cpu"), parametrize._cache_enabled,
        torch.is_autocast_cache_enabled(), saves_tensors(),
    )  # fmt: skip


LEFT: list[Any] = []
"""Holds what was entered, as it ends with its last reference."""


def enter(mode: Any) -> None:
    LEFT.append(mode)
    mode.__enter__()


CHANGES: dict[str, Callable[[], object]] = {
    "set_default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "set_default_device": lambda: torch.set_default_device("meta"),
    "use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "set_float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": lambda: enter(torch.inference_mode()),
    "set_num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "autocast": lambda: enter(torch.autocast("cpu", enabled=False)),
    "set_autocast_enabled": lambda: torch.set_autocast_enabled("cpu", True),
    "set_autocast_cache_enabled": lambda: torch.set_autocast_cache_enabled(False),
    "set_autocast_dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "nn.utils.parametrize.cached": lambda: setattr(parametrize, "_cache_enabled", 1),
    "autograd.graph.disable_saved_tensors_hooks": lambda: (
        torch._C._autograd._saved_tensors_hooks_disable("not here")
    ),
    "backends.mkldnn.enabled": lambda: torch.backends.mkldnn.set_flags(False),
    "backends.mkldnn.deterministic": lambda: torch._C._set_mkldnn_deterministic(True),
    "backends.cuda.enable_flash_sdp": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "backends.cuda.enable_math_sdp": lambda: torch.backends.cuda.enable_math_sdp(False),
    "backends.cuda.enable_mem_efficient_sdp": (
        lambda: torch.backends.cuda.enable_mem_efficient_sdp(False)
    ),
    "set_flush_denormal": lambda: torch.set_flush_denormal(True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_factory_that_changes_a_setting_of_torch_is_refused_and_it_is_given_back(
    name: str,
) -> None:
    def factory(params: Mapping[str, Any]) -> Recipe:
        CHANGES[name]()
        return recipe_of(nn.Linear(3, 1))

    before = seen()
    with pytest.raises(ConfigurationError, match=rf"estimator_gen_fn changes torch\.{name} \(from"):
        build_recipe(factory, {}, 0, Columns(("x",), ("y",)))
    assert seen() == before


def test_an_error_of_code_that_changes_a_setting_has_a_note_of_it() -> None:
    before = seen()
    with pytest.raises(ValueError, match="mine") as raised, shared_settings_kept():
        torch.set_default_dtype(torch.float64)
        raise ValueError("mine")
    assert "code of the trial changes torch.set_default_dtype" in raised.value.__notes__[0]
    with pytest.raises(Cancelled), shared_settings_kept():
        torch.set_default_dtype(torch.float64)
        raise Cancelled("in the middle")
    assert seen() == before


def hooks() -> dict[str, Any]:
    """Return what torch knows of hooks for all modules and all optimizers."""
    both = {**vars(torch_module), **vars(torch_optimizer)}
    known = {name: value for name, value in both.items() if "_global_" in name}
    return {name: copy(each) for name, each in known.items()}


@pytest.mark.parametrize(
    ("kind", "register"),
    [
        ("pre hook for all optimizers", torch_optimizer.register_optimizer_step_pre_hook),
        ("post hook for all optimizers", torch_optimizer.register_optimizer_step_post_hook),
        ("forward pre hook", torch_module.register_module_forward_pre_hook),
        (
            "forward hook",
            partial(torch_module.register_module_forward_hook, with_kwargs=True, always_call=True),
        ),
        ("backward hook", torch_module.register_module_backward_hook),
        ("backward hook", torch_module.register_module_full_backward_hook),
        ("backward pre hook", torch_module.register_module_full_backward_pre_hook),
        ("module registration hook", torch_module.register_module_module_registration_hook),
        ("parameter registration hook", torch_module.register_module_parameter_registration_hook),
    ],
)
def test_code_that_registers_hooks_for_all_modules_is_told_so_and_others_have_none(
    kind: str, register: Callable[[Any], Any]
) -> None:
    before = hooks()
    whose = "" if "for all" in kind else " for all modules"
    told = f"code of the trial registers a {kind}{whose} of the process"
    with pytest.raises(ConfigurationError, match=told), shared_settings_kept():
        register(lambda *_: None)
    assert hooks() == before


class Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.relu else found


class Thrice(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 3 if func is torch.ops.aten.relu.default else found


def saved_tensors_hooks() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x * 5, lambda x: x)


def computed() -> tuple[Any, ...]:
    """Return what comes of an operation, its backward, and where a tensor is made."""
    x = torch.full((1,), 1.5, requires_grad=True)
    loss = torch.relu(x) * x
    loss.backward()
    return loss.item(), x.grad.item() if x.grad is not None else None, torch.ones(1).device


MODES: dict[str, Callable[[], Any]] = {
    "Twice": Twice,
    "Thrice": Thrice,
    "saved_tensors_hooks": saved_tensors_hooks,
    "DeviceContext": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("outer", [None, Twice, Thrice, saved_tensors_hooks])
@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_code_does_not_leave_is_left_and_told(
    name: str, outer: Callable[[], Any] | None
) -> None:
    told = f"code of the trial enters {name} and does not leave it"
    with outer() if outer else nullcontext():
        before = computed()
        with shared_settings_kept(), MODES[name]():
            torch.ones(1)
        with pytest.raises(ConfigurationError, match=told), shared_settings_kept():
            MODES[name]().__enter__()
        assert computed() == before
        with pytest.raises(Cancelled), shared_settings_kept():
            MODES[name]().__enter__()
            MODES[name]().__enter__()
            raise Cancelled("in the middle")
        assert computed() == before


def test_who_lowers_the_depth_of_calls_is_told_and_it_is_given_back() -> None:
    before = sys.getrecursionlimit()
    told = f"changes sys.setrecursionlimit .from {before} to {before - 1}.,"
    with pytest.raises(ConfigurationError, match=told), shared_settings_kept():
        sys.setrecursionlimit(before - 1)
    assert sys.getrecursionlimit() == before


def test_hooks_for_all_modules_that_others_registered_stay() -> None:
    mine = torch_module.register_module_forward_hook(lambda *_: None, with_kwargs=True)
    try:
        before = hooks()
        with shared_settings_kept():  # as what counts operations does, for a while
            torch_module.register_module_forward_hook(lambda *_: None).remove()
        told = "takes away a forward hook for all modules"
        with pytest.raises(ConfigurationError, match=told), shared_settings_kept():
            mine.remove()
        assert hooks() == before
    finally:
        mine.remove()


@pytest.fixture
def limit() -> Iterator[int]:
    """A limit of open files that is below what the process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    yield soft - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit_files(number: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def test_code_that_lowers_a_limit_is_told_so_and_others_have_what_they_had(limit: int) -> None:
    told = rf"code of the trial changes resource\.RLIMIT_NOFILE \(from {limit} to 40\)"
    with pytest.raises(ConfigurationError, match=told), shared_settings_kept():
        limit_files(40)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit
    with shared_settings_kept():
        limit_files(limit + 1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == limit + 1, "what is raised helps all"


def test_code_that_lowers_what_its_process_may_compute_is_told_so() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    lower = 10**9 if soft == resource.RLIM_INFINITY else soft - 1
    with pytest.raises(ConfigurationError, match="RLIMIT_CPU"), shared_settings_kept():
        resource.setrlimit(resource.RLIMIT_CPU, (lower, hard))
    assert resource.getrlimit(resource.RLIMIT_CPU) == before


def test_settings_that_are_set_to_what_they_are_are_no_change() -> None:
    before = seen()
    with shared_settings_kept():
        torch.set_float32_matmul_precision("highest")  # it is "none" until the first time
        torch.use_deterministic_algorithms(False)
        torch.set_flush_denormal(False)
    assert seen() == before


def test_precisions_that_have_no_common_name_are_given_back() -> None:
    cuda, cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    try:
        cpu.fp32_precision = "bf16"
        with pytest.raises(ConfigurationError, match="matmul"), shared_settings_kept():
            torch.set_float32_matmul_precision("high")
        assert (cuda.fp32_precision, cpu.fp32_precision) == ("ieee", "bf16")
    finally:
        torch.set_float32_matmul_precision("highest")
