"""Builds recipes with the user's factory, with random numbers under control.

A factory may build on the meta device; what it computed there is computed again with values. A
trial may begin with weights that were trained before.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import random
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from cerebro_hydra.errors import ConfigurationError, kind_of
from cerebro_hydra.recipe.attributes import kept_attributes
from cerebro_hydra.recipe.batch.columns import Columns
from cerebro_hydra.recipe.module_origins import is_own
from cerebro_hydra.recipe.randomness import forget_joined_operations
from cerebro_hydra.recipe.recipe import Recipe, WarmStart
from cerebro_hydra.recipe.shared_settings import shared_settings_kept

_STATELESS = bool, str, type(None)
_OF_TORCH = "torch.nn."
_ACTIVATIONS = nn.ReLU.__module__
_MOST_REFERENCES = 100_000
_ENDS = bool, int, float, str, bytes, types.ModuleType, types.BuiltinFunctionType, Tensor
"""What refers to nothing of a trial."""

_UNWRITTEN = ("aten::empty", "aten::new_empty")


class GeneratorLock:
    """A lock that a thread may take several times, and that can be taken from one that hangs.

    A thread that is given up meets an exception at any moment. So the inner lock is entered itself:
    to enter a condition is Python code, which an exception can leave with the lock held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            self._changed.wait_for(lambda: self._owner in (None, me))
            self._owner = me
            self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._owner == threading.get_ident():  # else it was taken from this thread
                self._depth -= 1
                self._free_if(self._depth == 0)

    def take_from(self, thread: int) -> None:
        """Free the lock if this thread, which must never go on, has it."""
        with self._lock:
            self._free_if(self._owner == thread)

    def _free_if(self, free: bool) -> None:
        if free:
            self._owner, self._depth = None, 0
            self._changed.notify()


# There is one CPU generator per process, and a validator of Spark ML transforms with one model
# while another thread's trials are admitted.
exclusive_generator = GeneratorLock()
"""Keeps other threads from building, admitting and replaying."""


def recipe_of(built: Any) -> Recipe:
    """Return the recipe that an `estimator_gen_fn` returned, or whose estimator it returned.

    Raises:
        ConfigurationError: it returned something else.
    """
    recipe = getattr(built, "recipe", built)
    if not isinstance(recipe, Recipe):
        kind = f"the class {built.__name__}" if isinstance(built, type) else kind_of(built)
        raise ConfigurationError(
            f"estimator_gen_fn returned {kind}; return a SparkEstimator or a Recipe"
        )
    return recipe


_builds = Counter[str]()  # of this process


def builds_so_far() -> int:
    """Return how many trials this process has built, each of which may set what they share."""
    return _builds.total()


def build_recipe(
    factory: Callable[[Any], Any], params: Mapping[str, Any], seed: int, columns: Columns
) -> Recipe:
    """Run the user's factory with the search's seed, so that equal layers start with equal bits.

    So does what it draws from the global generators of Python and NumPy, which go on afterwards as
    if nothing had been drawn. A model on the meta device gets memory for the values that
    `warm_start` has.
    """

    def build() -> Recipe:
        _builds["begun"] += 1
        torch.manual_seed(seed)
        with _seeded_generators(seed), shared_settings_kept("estimator_gen_fn"):
            made = recipe_of(factory(dict(params)))
        forget_joined_operations()  # of a model that the factory has run
        return made

    recipe = build()
    if is_on_meta(recipe.model):
        with MetaOperations() as operations:
            recipe = build()
        give_memory(recipe, operations)
    take_own_layers(recipe)
    freeze_as_in_training(recipe.model)
    return recipe.bind(columns)


_built = WeakIdKeyDictionary()
"""The modules of all models that this process has built."""


def take_own_layers(recipe: Recipe) -> None:
    """Copy the activations of a model that was just built, which others may have, too.

    So it is where one is the default of an argument, as of `def __init__(self, act=nn.ReLU())`, a
    global variable or an attribute of a class. Trials that take turns on a device would meet one
    another's hooks there. A layer is left if anything else of the trial refers to it, such as a
    list of the model's, the keys of a dict, or what its code names but in `__init__`, and if it has
    hooks, or numbers that may be set, such as the rate of a dropout.
    """
    places = list[tuple[nn.Module, str, nn.Module]]()
    within = set[int]()
    for parent in recipe.model.modules():  # what holds others comes first
        for name, layer in parent._modules.items() if parent not in _built else ():
            if layer is not None and id(parent) not in within and _is_stateless(layer):
                places.append((parent, name, layer))
                within.update(map(id, layer.modules()))
    referred = _referred_to(recipe) if places else set()
    copies: dict[int, Any] = {}  # what a model has twice it has twice again
    for parent, name, layer in places:
        if referred.isdisjoint(map(id, layer.modules())):
            parent._modules[name] = copy.deepcopy(layer, copies)
    for each in recipe.model.modules():
        _built[each] = True


def _referred_to(recipe: Recipe) -> set[int]:
    """Return the ids of what a trial refers to but as a registered module of another one.

    What it has as a whole number may be an id, too.
    """
    modules = {id(each): each for each in recipe.model.modules()}
    metrics = [metric.function for metric in recipe.metric_list]
    left: list[Any] = [recipe.loss, recipe.collate, recipe.training_step, *metrics]
    left += [recipe.lr_scheduler, *vars(recipe.optimizer).values()]
    left += [v for each in modules.values() for n, v in vars(each).items() if n != "_modules"]
    kinds = {kind for each in modules.values() for kind in type(each).__mro__}
    for kind in kinds:
        if not kind.__module__.startswith((_OF_TORCH, "builtins")):
            for method in _methods(kind):
                left += [method, *map(vars(kind).get, _names_in(method.__code__))]
    found, numbers = set[int](), set[int]()
    while left and len(found) < _MOST_REFERENCES:
        each = left.pop()
        if type(each) is int:
            numbers.add(each)
        if id(each) in found or isinstance(each, _ENDS):
            continue
        found.add(id(each))
        if id(each) in modules:
            continue
        if isinstance(each, type):  # whose code may name a layer, too
            left += [method for owner in _owners(each) for method in _methods(owner)]
        elif isinstance(each, types.FunctionType):
            left += [each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each)]
            if not str(each.__module__).startswith("torch."):
                names = _names_in(each.__code__)
                named = [value for n in names if (value := each.__globals__.get(n)) is not None]
                owners = [owner for value in named for owner in _owners(value)]
                left += [*named, *(vars(owner).get(n) for owner in owners for n in names)]
        elif isinstance(each, weakref.ref):
            left.append(each())
        else:
            left += gc.get_referents(each)
    return found | numbers | ({*modules} if left else set())


def _owners(value: Any) -> list[Any]:
    """Return what has attributes that code may name: a module, a class of the user's, its bases."""
    if isinstance(value, types.ModuleType):
        return [value]
    kinds = value.__mro__ if isinstance(value, type) else ()
    return [each for each in kinds if is_own(each.__module__)]


def _methods(kind: type) -> list[Any]:
    """Return the functions of a class but `__init__`, where a model is only built."""
    found = list[Any]()
    for name, each in vars(kind).items():
        parts = [each.fget, each.fset] if isinstance(each, property) else [each]
        found += [getattr(e, "__func__", e) for e in parts] if name != "__init__" else []
    return [*filter(inspect.isfunction, found)]


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)


def _is_stateless(layer: nn.Module) -> bool:
    """Return whether it has no tensors, hooks or numbers, but an activation's, such as a slope."""
    for module in layer.modules():
        of = type(module).__module__
        plain = (*_STATELESS, int, float) if of == _ACTIVATIONS else _STATELESS
        held = (value for name, value in vars(module).items() if name != "_modules")
        empty = (isinstance(v, plain) or (isinstance(v, dict | set) and not v) for v in held)
        if not (of.startswith(_OF_TORCH) and all(empty)):
            return False
    return True


def freeze_as_in_training(model: nn.Module) -> None:
    """Let a model's own `train` freeze what it does, so that all of its builds train the same."""
    if any(type(module).train is not nn.Module.train for module in model.modules()):
        with kept_attributes(model), suppress(Exception):  # training begins with it, and tells
            model.train()


@contextmanager
def _seeded_generators(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and NumPy for the body."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def build_keeping_random_state(
    factory: Callable[[Any], Any], params: Mapping[str, Any], seed: int, columns: Columns
) -> Recipe:
    """Build a recipe and leave the process's random numbers as if nothing had been built."""
    with exclusive_generator, torch.random.fork_rng(devices=[]):
        return build_recipe(factory, params, seed, columns)


def load_warm_start(model: nn.Module, given: WarmStart) -> None:
    """Copy a state dict into a model; its names and shapes must be the model's own.

    Args:
        given: the state dict; what has one, such as a trained model or a module; or the path of a
            safetensors file. Tied tensors may come once.

    Raises:
        ConfigurationError: the file can't be read, or a name or shape differs.
    """
    state = _state_of(given)
    own = model.state_dict(keep_vars=True)
    covered = {id(own[name]) for name in state if name in own}
    missing = [name for name, tensor in own.items() if id(tensor) not in covered]
    unknown = [name for name in state if name not in own]
    if missing or unknown:
        raise ConfigurationError(
            f"warm_start is no state dict of this model: missing {missing[:10]}, unknown "
            f"{unknown[:10]}; add or leave out such entries in the factory"
        )
    with torch.no_grad():
        for name, tensor in state.items():
            _check_kind(name, tensor, own[name])
            if own[name].shape != tensor.shape:
                raise ConfigurationError(
                    f"warm_start has {name} of shape {tuple(tensor.shape)}, the model's is "
                    f"{tuple(own[name].shape)}"
                )
            own[name].copy_(tensor)


def _state_of(given: WarmStart) -> Mapping[str, Tensor]:
    if isinstance(given, Mapping):
        return given
    if isinstance(given, str):
        return _read(given)
    if callable(getattr(given, "state_dict", None)) and not isinstance(given, type):
        return given.state_dict()
    raise ConfigurationError(
        f"warm_start is {given!r}; give a trained model or a module, their state dict, or the path "
        "of a safetensors file with one"
    )


def _check_kind(name: str, given: Any, own: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise ConfigurationError(
            f"warm_start has {kind_of(given)} for {name}; give tensors, as in a state_dict"
        )
    if given.is_floating_point() != own.is_floating_point():
        raise ConfigurationError(
            f"warm_start has {name} as {given.dtype}, the model's is {own.dtype}; numbers would be "
            "lost or made up: give that type"
        )


class _MappedFile(Mapping[str, Tensor]):
    """Reads each tensor of a safetensors file when it is asked for, from mapped memory."""

    def __init__(self, path: str) -> None:
        self._file = safetensors.safe_open(path, "pt")
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _read(path: str) -> Mapping[str, Tensor]:
    if not os.path.isfile(path):
        raise ConfigurationError(
            f"warm_start is {path!r}, and there is no such file; give the path of a safetensors "
            "file, or a state dict"
        )
    try:
        return _MappedFile(path)
    except safetensors.SafetensorError as error:
        raise ConfigurationError(
            f"warm_start is {path!r}, which is no safetensors file ({error}); write one with "
            "safetensors.torch.save_file(model.state_dict(), path)"
        ) from error


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model has parameters or buffers on the meta device, in part or whole."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def give_memory(recipe: Recipe, operations: MetaOperations) -> None:
    """Let nothing of a recipe's model be on the meta device.

    Parameters and persistent buffers get memory that nobody has touched yet, so it costs nothing,
    for `warm_start` has their values. Other buffers and tensors get their values.

    Args:
        operations: what the factory did.

    Raises:
        ConfigurationError: there is no warm_start, or the value of a tensor can't be told.
    """
    if recipe.warm_start is None:
        raise ConfigurationError(
            "the model is on the meta device, where tensors have no values; set warm_start to a "
            "safetensors file with its state dict, or build it on the CPU"
        )
    _check_optimizer(recipe.optimizer)
    loaded = set(map(id, recipe.model.state_dict(keep_vars=True).values()))
    made: dict[int, Tensor] = {}
    unknown: list[str] = []
    for path, module in recipe.model.named_modules():
        for attributes in (module._buffers, vars(module)):
            for name, tensor in attributes.items():
                if not isinstance(tensor, Tensor) or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    is_loaded = id(tensor) in loaded
                    value = _untouched(tensor) if is_loaded else operations.value(tensor)
                    if value is None:
                        unknown.append(f"{path}.{name}" if path else name)
                        continue
                    made[id(tensor)] = value
                attributes[name] = made[id(tensor)]
    if unknown:
        raise ConfigurationError(
            f"the factory makes {unknown[:10]} on the meta device, which are in no state dict, "
            "from data or random numbers; make them with device='cpu', or register them as "
            "persistent buffers and add them to warm_start"
        )
    operations.forget()  # views that it knows of keep a parameter as it is
    for parameter in recipe.model.parameters():
        if parameter.is_meta:
            own = nn.Parameter(_untouched(parameter), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, own)  # the optimizer refers to the object
            vars(parameter).update(vars(own))


def _untouched(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ConfigurationError(
                    f"optimizer {type(optimizer).__name__} has made its state {key!r} on the meta "
                    "device, where it has no values; choose one that makes its state in its first "
                    "step, such as AdamW, or build the model on the CPU"
                )


class MetaOperations(TorchDispatchMode):
    """Notes, while it is entered, the operations on tensors of the meta device.

    The tables of rotary embeddings and of positions are computed, so no checkpoint needs them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self._made: dict[int, UntypedStorage] = {}  # by the memory on the meta device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if [*_on_meta((args, kwargs, result))]:
            self._noted.append((func, args, kwargs or {}, result))
        return result

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor of the meta device with its value, on the CPU.

        It is None if the value comes from random numbers, or from what was not seen.
        """
        memory = {_memory(tensor)}
        needed = []
        for operation in reversed(self._noted):
            func, args, kwargs, result = operation
            changed = (args, kwargs, result) if func._schema.is_mutable else result
            if memory.isdisjoint(map(_memory, _on_meta(changed))):
                continue
            if torch.Tag.nondeterministic_seeded in func.tags:
                return None
            memory.update(map(_memory, _on_meta((args, kwargs))))
            needed.append(operation)
        known: set[int] = set()
        for func, args, kwargs, result in reversed(needed):
            if not func._schema.name.startswith(_UNWRITTEN):
                known.update(map(_memory, _on_meta((args, kwargs, result))))
        if not memory <= known:
            return None
        for func, args, kwargs, result in reversed(needed):
            again = func(*tree_map(self._on_cpu, args), **tree_map(self._on_cpu, kwargs))
            for before, now in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(before, Tensor) and before.is_meta:
                    self._made[_memory(before)] = now.untyped_storage()
        return self._on_cpu(tensor)  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Refer to no tensor any more."""
        self._noted.clear()

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "meta" else value
        if not isinstance(value, Tensor) or not value.is_meta:
            return value
        made = torch.empty(0, dtype=value.dtype)
        form = value.storage_offset(), value.shape, value.stride()
        return made.set_(self._made[_memory(value)], *form)  # type: ignore[call-overload]


def _on_meta(values: Any) -> Iterator[Tensor]:
    return (v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_meta)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
