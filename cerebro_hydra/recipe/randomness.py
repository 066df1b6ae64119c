"""Defines what the random numbers of a trial depend on, and where in a model they restart.

What else decides bits is set here, too: CUDA's deterministic algorithms, mixed precision, and the
fast path of attention and what TorchScript joins.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from cerebro_hydra.errors import ConfigurationError, StepDiffers
from cerebro_hydra.plan.seeds import seed_of
from cerebro_hydra.recipe.batch.collating import check_not_in_collate
from cerebro_hydra.recipe.placement import CPU
from cerebro_hydra.threads import SetForAll

FORWARD = ""
"""Stands, in place of a unit's name, for a forward pass before its first unit."""

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The setting without which cuBLAS may choose other algorithms each time; torch asks for it."""

_WORDS = 4 * 625  # of a Mersenne twister: 624 of its state, and its place in them
_Words = ctypes.c_char * _WORDS

AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def units(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that no cut splits and where random numbers restart.

    Children of a `Sequential` or `ModuleList` are units unless they are such containers themselves;
    outside of containers, modules without children are. A module with several names goes by its
    first, and is no unit if that lies inside of another one.
    """
    first_names = {name for name, _ in model.named_modules()}
    return tuple(name for name in _walk(model, "") if name in first_names)


def _walk(module: nn.Module, name: str) -> Iterator[str]:
    in_container = isinstance(module, (nn.Sequential, nn.ModuleList))
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        nested = isinstance(child, (nn.Sequential, nn.ModuleList)) and len(child) > 0
        if nested or (not in_container and any(True for _ in child.children())):
            yield from _walk(child, path)
        else:
            yield path


def leave_uncompiled(model: nn.Module) -> tuple[str, ...]:
    """Let modules that hold units run as they were before torch.compile; return their names.

    A graph of torch.compile would end at each unit, and a unit can be compiled by itself.
    """
    modules = dict(model.named_modules())
    paths = [unit.split(".") for unit in units(model)]
    holders = {".".join(path[:length]) for path in paths for length in range(len(path))}
    found = []
    for name in sorted(holders & modules.keys()):
        module = modules[name]
        original = vars(module).get("_modules", {}).get("_orig_mod")
        if type(module).__name__ == "OptimizedModule" and original is not None:
            module.forward = wraps(original.forward)(partial(original.__call__))
            found.append(name)
        elif vars(module).get("_compiled_call_impl") is not None:  # Module.compile()
            module._compiled_call_impl = None
            found.append(name)
    return tuple(found)


@dataclass(frozen=True)
class RandomKey:
    """Names the place of a forward pass in its trial; random numbers depend on nothing else.

    On another device than the CPU, they also depend on what that device makes of a seed.
    """

    trial_seed: int
    step: int
    microbatch: int
    device: torch.device = CPU

    def reseed(self, unit: str) -> None:
        """Restart the generators for a unit call, named `module@call`, or for `FORWARD`."""
        seed = seed_of(self.trial_seed, self.step, self.microbatch, unit)
        for generator in generators(self.device):
            generator.manual_seed(seed)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Let the generators of torch, Python and NumPy go on as if the body had drawn nothing."""
    ours, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)


def generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators that draw numbers where a device trains: the CPU's and its own."""
    if device == CPU:
        return (torch.default_generator,)
    own = torch.get_device_module(device).default_generators[device.index]
    return (torch.default_generator, own)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Let the generators go on as if the body had drawn nothing."""
    states = [(each, each.get_state()) for each in generators(device)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def generator_states(device: torch.device) -> list[bytes]:
    """Return what tells whether one of these generators has drawn numbers meanwhile."""
    with no_dispatch():  # whoever watches operations, or pretends to do them, has none of these
        return [each.get_state().numpy().tobytes() for each in generators(device)]


def global_states() -> tuple[object, object]:
    """Return what tells whether the global generators of Python and NumPy have drawn meanwhile."""
    pythons: random.Random = random._inst  # type: ignore[attr-defined]
    return _state_of(pythons), _state_of(np.random.get_bit_generator())


def _state_of(generator: random.Random | np.random.BitGenerator) -> object:
    # The generators' own functions make 600 objects of Python for it, which takes 0.1 ms.
    memory = _memory_of(generator)
    return repr(generator.state) if memory is None else memory.raw  # type: ignore[union-attr]


@lru_cache(maxsize=2)  # it keeps a generator, so its memory stays
def _memory_of(
    generator: random.Random | np.random.BitGenerator,
) -> ctypes.Array[ctypes.c_char] | None:
    """Return where the state of a Mersenne twister lies, None for another generator."""
    if isinstance(generator, random.Random):
        return _Words.from_address(id(generator) + object.__basicsize__)
    if isinstance(generator, np.random.MT19937):
        return _Words.from_address(generator.ctypes.state_address)
    return None


class UnitCalls:
    """Counts the calls of each unit in a forward.

    Attributes:
        made: the unit calls of the present forward, in order; each forward begins another list.

    Args:
        entered: is called with `FORWARD` at each forward, and with each unit call ("module@call").
    """

    def __init__(self, entered: Callable[[str], object]) -> None:
        self.made: list[str] = []
        self._entered = entered
        self._counts: Counter[str] = Counter()
        self._again: Iterator[str] | None = None

    def begin(self) -> None:
        """Begin a forward."""
        self.made = []
        self._counts.clear()
        self._entered(FORWARD)

    def hook(self, name: str) -> Callable[[nn.Module, object], None]:
        """Return what a unit calls before its forward."""

        def hook(module: nn.Module, args: object) -> None:
            # Code that torch compiles, as the branches of torch.cond, can't call what it is given.
            if not torch.compiler.is_dynamo_compiling():
                check_not_in_collate()
                self._entered(self._call(name))

        return hook

    @contextmanager
    def again(self, made: Sequence[str]) -> Iterator[None]:
        """Let units that are entered be those calls of a forward, which runs again in part."""
        before, self._again = self._again, iter(made)
        try:
            yield
        finally:
            self._again = before

    def _call(self, name: str) -> str:
        if self._again is not None:
            unit = next(self._again, "")
            if unit.rpartition("@")[0] != name:
                raise StepDiffers(f"backward runs {name!r}, where the forward ran {unit!r}")
            return unit
        if torch._C._current_graph_task_id() >= 0:  # the user's checkpoint runs it again
            if self._counts[name] > 1:
                raise ConfigurationError(
                    f"backward runs {name!r} again, which ran {self._counts[name]} times in one "
                    "forward, so its random numbers can't be told; leave out "
                    "torch.utils.checkpoint, or the reversible layer"
                )
            return f"{name}@0"
        unit = f"{name}@{self._counts[name]}"
        self._counts[name] += 1
        self.made.append(unit)
        return unit


@contextmanager
def unit_hooks(model: nn.Module, entered: Callable[[str], object]) -> Iterator[UnitCalls]:
    """Call `entered` with `FORWARD` at each forward, and with each unit call ("module@call")."""
    calls = UnitCalls(entered)
    modules = dict(model.named_modules())
    handles = [
        model.register_forward_pre_hook(lambda *_: calls.begin()),  # deepcopy leaves it alone
        *(modules[name].register_forward_pre_hook(calls.hook(name)) for name in units(model)),
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def trial_seed(seed: int, trial: int) -> int:
    """Derive the seed of a trial's dropout and collating from that of the search."""
    return seed_of(seed, "trial", trial)


_exact: list[torch.library.Library] = []
_registering = threading.Lock()


def compute_deterministically(device: torch.device) -> None:
    """Let this process train on a device with the same bits each time; call it before CUDA is used.

    An operation that CUDA has in no such form is an error of torch, which names it. TF32 stays as
    the user's code sets it.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault(WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.cuda.set_device(device)


def compute_as(numerics: str) -> None:
    """Let this process, whose kernels are chosen so, compute the same bits as its like.

    With "portable" that takes more than `KERNELS`: MKL makes square roots of approximations that
    are each CPU's own, in any of its modes, and a fifth of them are not the nearest number. NumPy's
    come from the instruction that IEEE 754 defines. It can't be undone in this process.
    """
    if numerics != "portable":
        return
    with _registering, warnings.catch_warnings():
        if _exact:
            return
        warnings.simplefilter("ignore")  # that torch has this operation already
        library = torch.library.Library("aten", "IMPL")
        library.impl("sqrt", exact_sqrt, "CPU")
        library.impl("sqrt_", lambda x: _sqrt_into(x, out=x), "CPU")
        library.impl("sqrt.out", _sqrt_into, "CPU")
        _exact.append(library)  # its end would undo it


def computes_portably() -> bool:
    """Return whether this process was told to by `compute_as`."""
    return bool(_exact)


def exact_sqrt(x: Tensor) -> Tensor:
    """Return the square roots of a tensor's elements, each the nearest number of its type."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return exact_sqrt(x.float()).to(x.dtype)
    if not (x.is_floating_point() or x.is_complex()):
        x = x.to(torch.get_default_dtype())
    with np.errstate(invalid="ignore"):  # of a negative number it is NaN, as torch's
        return torch.from_numpy(
            np.asarray(np.sqrt(x.detach().resolve_conj().resolve_neg().numpy()))
        )


def _sqrt_into(x: Tensor, *, out: Tensor) -> Tensor:
    root = exact_sqrt(x)
    if not torch.can_cast(root.dtype, out.dtype):
        raise RuntimeError(
            f"result type {root.dtype} can't be cast to the desired output type {out.dtype}"
        )
    return out.resize_(root.shape).copy_(root)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Compute so for a while, in a process that has other uses of CUDA."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    current = torch.cuda.current_device()
    try:
        compute_deterministically(device)
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.cuda.set_device(current)


def autocasting(name: str | None, device: str) -> AbstractContextManager[Any]:
    """Return a context in which operations run in the named precision of `AUTOCAST`."""
    if name is None:
        return nullcontext()
    # Without its cache, a weight's cast doesn't depend on what else ran before.
    return torch.autocast(device, AUTOCAST[name], cache_enabled=False)


def _begin_without_fast_path() -> Callable[[], object]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return partial(torch.backends.mha.set_fastpath_enabled, before)


without_fast_path = SetForAll(_begin_without_fast_path)


@contextmanager
def by_parts() -> Iterator[None]:
    """Let torch's transformer layers, and functions of TorchScript, compute operation by operation.

    The layers do so in training, and the functions in their first call of a process, in which
    torch looks at what it may join; joined operations round otherwise.
    """
    with without_fast_path(), torch.jit.optimized_execution(False):
        yield


def forget_joined_operations() -> None:
    """Let functions of TorchScript that were called before in this process compute `by_parts`."""
    known: Any = torch.jit._state
    for name in tuple(known._jit_caching_layer.values()):
        if (function := known._python_cu.find_function(name)) is not None:
            function._debug_flush_compilation_cache()
