"""Runs the blocks of a model as torch.compile makes them, with the same bits in every process.

A block is compiled alone, for fixed shapes, so that what is made of it depends on nothing that was
compiled before, nor on the shards that a model is cut into.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.foreign_text import is_error, named_error_text
from cerebro_hydra.recipe.randomness import units
from cerebro_hydra.threads import SetForAll
from cerebro_hydra.worker_imports import safe_path

MOST_FORMS = 1024
"""Compiled forms of one kind of block in a process: one for each shape, mode and setting."""

_ALIKE = {
    "automatic_dynamic_shapes": False,  # else what is made depends on the shapes that came before
    "recompile_limit": MOST_FORMS,
    "accumulated_recompile_limit": 64 * MOST_FORMS,
    "fail_on_recompile_limit_hit": True,  # else it would go on uncompiled, with other bits
    "suppress_errors": False,
}
_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
_OPTIONS = {
    "compile_threads": 1,  # more of them are processes, which would stay
    "deterministic": True,  # nothing is chosen by how fast it was
}


def compilable_units(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the units of a model that gain by torch.compile.

    A layer of torch without children is one operation. What was compiled already, or has got
    another forward, stays as it is; so does a block that contains another unit, at whose entry
    random numbers restart.
    """
    modules, names = dict(model.named_modules()), units(model)
    own = {id(modules[name]) for name in names}
    return tuple(name for name in names if _gains(modules[name], own))


def _gains(module: nn.Module, of_units: set[int]) -> bool:
    if "forward" in vars(module) or vars(module).get("_compiled_call_impl") is not None:
        return False
    inside = {id(each) for each in module.modules()} - {id(module)}
    is_layer = type(module).__module__.startswith("torch.nn.") and not inside
    return not is_layer and inside.isdisjoint(of_units)


def check_compilable(model: nn.Module) -> tuple[str, ...]:
    """Return the units that compile=True compiles.

    Raises:
        ConfigurationError: there are none, or this machine can't compile.
    """
    names = compilable_units(model)
    if not names:
        raise ConfigurationError(
            f"compile is True, and no block of this {type(model).__name__} gains by it, because "
            "each is one layer of torch, or compiled already; let the members of its Sequential or "
            "ModuleList be modules with several layers, or leave compile out"
        )
    if (missing := missing_for_compiling()) is not None:
        raise ConfigurationError(
            f"compile is True, and torch can't compile on host {socket.gethostname()}: {missing}, "
            "there and on all workers, or leave compile out"
        )
    return names


def missing_for_compiling() -> str | None:
    """Return what keeps torch.compile from making code for the CPU here, in words, or None."""
    if (name := next((n for n in _SWITCHES if os.environ.get(n) == "1"), None)) is not None:
        return f"{name} is 1, by which torch compiles nothing; unset it"
    if shutil.which(_compiler()) is None:
        return (
            f"there is no C++ compiler, as {_compiler()!r} is not found; install it, or let CXX "
            "name another one"
        )
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        return f"there are no headers of Python, as {headers} is not found; install them"
    return None


def compiler_version() -> str | None:
    """Return name and version of the compiler that torch.compile calls here, None if it can't."""
    if missing_for_compiling() is not None:
        return None
    told = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=False)
    return told.stdout.partition("\n")[0].strip() or None


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


class CompiledUnits:
    """Lets units of a model, or of a copy of it, run compiled for a while.

    Args:
        names: those of the units; none changes nothing.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self._modules: WeakKeyDictionary[nn.Module, list[tuple[str, nn.Module]]]
        self._modules = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the names alone, because a copied recipe has another model."""
        return CompiledUnits, (self.names,)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Let a model's units run compiled, but where each of their operations is watched."""
        if not self.names:
            with compiled_alike():
                yield
            return
        if model not in self._modules:
            found = dict(model.named_modules())
            self._modules[model] = [(name, found[name]) for name in self.names]
        given: list[tuple[dict[str, Any], Callable[..., Any]]] = []
        for name, module in self._modules[model]:
            attributes = vars(module)
            if "forward" not in attributes:  # else an outer context has it
                attributes["forward"] = run = _compiled(name, module)
                given.append((attributes, run))
        try:
            with compiled_alike():
                yield
        finally:
            for attributes, run in given:
                if attributes.get("forward") is run:
                    del attributes["forward"]


def _compiled(name: str, module: nn.Module) -> Callable[..., Any]:
    plain = module.forward
    fast = _of_kind(module)

    @functools.wraps(plain, ("__name__", "__doc__"))  # whose module says that it is none of theirs
    def forward(*args: Any, **kwargs: Any) -> Any:
        if _is_watched():
            return plain(*args, **kwargs)
        set_is_in_mode_without_ignore_compile_internals(False)  # torch mixes threads up
        try:
            return fast(module, *args, **kwargs)
        except Exception as error:
            if not is_error(error, *_errors()):
                raise
            if is_error(error, torch._dynamo.exc.TorchRuntimeError):
                plain(*args, **kwargs)  # says it in the words of the layer that fails
            said = named_error_text(error).partition("\n\n")[0]
            raise ConfigurationError(
                f"torch.compile can't take unit {name!r}, {kind_of(module)} "
                f"({said}); leave compile out, or compile the layers that "
                "it takes in the function that makes the model"
            ) from error

    return forward


def _errors() -> tuple[type[Exception], ...]:
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit


def _is_watched() -> bool:
    """Return whether each operation is to be seen, or a transform or another compiler is at work.

    torch compiles nothing then.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and not all(
        torch._C._get_dispatch_stack_at(at).ignore_compile_internals() for at in range(depth)
    )


_kinds: dict[Hashable, Callable[..., Any]] = {}
_of_modules: WeakKeyDictionary[nn.Module, Callable[..., Any]] = WeakKeyDictionary()


def _of_kind(module: nn.Module) -> Callable[..., Any]:
    """Return the compiled forward of blocks with this code, layers and tensors.

    Equal blocks of all trials share it, and no others do: torch counts forms by code.
    """
    found = _of_modules.get(module)
    if found is None:
        forms = tuple((n, t.dtype, tuple(t.shape)) for n, t in module.state_dict().items())
        kind = type(module), repr(module), forms
        if kind not in _kinds:
            _kinds[kind] = _compile(type(module).forward)
        found = _of_modules[module] = _kinds[kind]
    return found


def _compile(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a copy of a forward, whose code counts by itself.

    It has the forward's own globals: those of a notebook's class, which came to a worker pickled,
    are in no module where torch would look for them.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(module, *args, **kwargs)

    of = plain if isinstance(plain, FunctionType) else forward
    own = FunctionType(
        of.__code__.replace(), of.__globals__, "forward", of.__defaults__, of.__closure__
    )
    own.__kwdefaults__ = of.__kwdefaults__
    _try_instructions()
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False, options=dict(_OPTIONS))
    return compiled


@functools.cache
def _try_instructions() -> None:
    """Let torch try this CPU's instructions, in processes that spare the current folder."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # which takes seconds to import

    with safe_path():
        pick_vec_isa()


def compile_alike() -> Callable[[], object]:
    """Let torch compile in this process as in any other, also what a user compiles.

    A form more than `MOST_FORMS` is an error.

    Returns:
        What lets it compile as before.
    """
    config: Any = torch._dynamo.config
    before = {name: getattr(config, name) for name in _ALIKE}
    _set_config(_ALIKE)
    return functools.partial(_set_config, before)


def _set_config(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(torch._dynamo.config, name, value)


compiled_alike = SetForAll(compile_alike)
"""Does that for a while."""


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let what was compiled run as its code says for a while, in all threads of this process."""
    with torch.compiler.set_stance("force_eager"):
        yield
