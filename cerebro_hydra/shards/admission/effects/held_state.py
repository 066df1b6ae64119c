"""Reads what a trial's model, functions and optimizer hold that hops with no shard."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from cerebro_hydra.errors import ConfigurationError
from cerebro_hydra.recipe import Recipe
from cerebro_hydra.recipe.lr_schedule import schedulers_of
from cerebro_hydra.recipe.module_origins import is_own
from cerebro_hydra.recipe.optimizer_list import members_of
from cerebro_hydra.shards.admission.effects.filled_caches import Variable
from cerebro_hydra.shards.admission.effects.object_reader import (
    ObjectReader,
    computed_attributes,
)
from cerebro_hydra.shards.admission.effects.readings import OF_GLOBAL, PART, Reading, name_of
from cerebro_hydra.shards.admission.effects.value_texts import PLAIN, are_settings, slots_of
from cerebro_hydra.shards.engine.optimizer import NOT_CLONED

_OF_TORCH = vars(nn.Module()).keys()
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_HOOKS_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OURS = __name__.partition(".")[0]
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_OF_BUFFER = ("_is_buffer", "persistent")
_LIBRARIES = {"torch", "builtins", "functools"}

OF_HOOKS = "what is kept by a"
"""Begins the names of what is read of hooks."""
OF_GRADIENT_HOOKS = "a gradient hook of parameter "
OF_OPTIMIZER = " of optimizer "
OF_PARAMETER = " of parameter "
OF_SCHEDULER = " of the lr_scheduler"
OF_METRIC = " of metric "
MADE = ", which training makes"

THE_OPTIMIZER = ("the optimizer", "its groups", "its state")
"""What stands in readings for the optimizer of the recipe, and for what it has."""


_COMPILER = "torch._dynamo."
_COMPUTING = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "matmul", "rmatmul", "truediv", "rtruediv",
    "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "lshift", "rlshift", "rshift", "rrshift",
    "and", "rand", "or", "ror", "xor", "rxor", "neg", "pos", "abs", "invert", "lt", "le", "eq",
    "ne", "gt", "ge", "hash", "bool", "int", "float", "complex", "index", "round", "len", "iter",
    "next", "contains", "getitem", "setitem", "delitem", "call", "enter",
)  # fmt: skip


class SetByTraining:
    """Stands in an evaluation for an attribute that training sets: who computes with it fails.

    A worker that evaluates may not have trained the step before, and has then another value.
    """

    __slots__ = ("_name",)

    STANDS_IN = True
    """Tells readers of objects that there is nothing to read, nor to ask for its class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def error(self) -> ConfigurationError:
        """Return the error of who computes with it."""
        return ConfigurationError(
            f"an evaluation reads {self._name}, which training sets, as none did at admission; a "
            "worker that evaluates may not have trained before. Register it as a buffer of the "
            "model, or let every forward set it anew"
        )

    def __format__(self, form: str) -> str:
        return str(self)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # as `isinstance` asks for it, for any type but this one
        if sys._getframe(1).f_globals.get("__name__", "").startswith(_COMPILER):
            return type(self)  # it looks at all attributes of a module
        raise self.error()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self.error()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        raise next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).error()


def _refuse(self: SetByTraining, *args: Any) -> Any:
    raise self.error()


for _operation in _COMPUTING:
    setattr(SetByTraining, f"__{_operation}__", _refuse)


class SetBefore(SetByTraining):
    """Stands, as a sub-epoch begins, for an attribute that each step sets before it reads it.

    What the step before left there is on the worker that took it.
    """

    __slots__ = ()

    def error(self) -> ConfigurationError:
        """Return the error of who computes with it."""
        return ConfigurationError(
            f"training reads {self._name} before it sets it, as none of the trial's first steps "
            "did; what an earlier step left there is no part of the state that hops. Register it "
            "as a buffer of the model, or let every forward set it anew"
        )

    __str__ = __format__ = _refuse  # type: ignore[assignment]


_MOST_READ = 16  # attributes that are computed with; of more, nothing is known


def not_computed_with(
    names: set[str], kind: type[SetByTraining], bits: Callable[[Collection[str]], list[str]]
) -> set[str]:
    """Return those of a model's attributes in whose place a stand-in changes no bit.

    Args:
        kind: of the stand-ins.
        bits: returns what comes out while they stand for attributes of such names.
    """
    plain = bits(()) if names else []
    for _ in range(_MOST_READ + 1 if plain else 0):
        try:
            return names if bits(names) == plain else set()
        except Exception as error:
            read = {name for name in names if str(kind(name).error()) in str(error)}
            names = names - read
            if not (read and names):
                break
    return set()


class HeldState:
    """Reads a trial's recipe, of which parameters and buffers that hop are no part.

    Each value has a name, such as "attribute 'gain' of module '1'", and in it a path.

    Args:
        recipe: with the model as it was built.
        buffers: the names of those that hop, None if all do that the model has now.
    """

    def __init__(self, recipe: Recipe, buffers: Collection[str] | None = None) -> None:
        model = recipe.model
        self._recipe = recipe
        self._root = f"the model ({type(model).__name__})"
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._built = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._hopping = self._built if buffers is None else frozenset(buffers)
        metrics = (metric.function for metric in recipe.metric_list)
        functions = (recipe.collate, recipe.training_step, recipe.lr_scheduler)
        held = (*model.modules(), *recipe.losses, *functions, *metrics)
        optimizers = members_of(recipe.optimizer)
        self._packages = {package_of(each) for each in (*held, *optimizers)} - _LIBRARIES

    def read(self) -> Reading:
        """Return what the model, its losses, collate and the LR scheduler's function hold."""
        return self.read_all().found

    def read_all(self) -> ObjectReader:
        """Return what has read that, and knows the caches that it met."""
        reader = self._reader()
        self._read_model(reader)
        self._read_beside(reader)
        return reader

    def read_whole(self) -> ObjectReader:
        """Return what has read that, the metrics and the recipe's optimizer."""
        reader = self._reader()
        self._read_model(reader)
        self._read_metrics(reader)
        _read_optimizer(reader, self._recipe.optimizer)
        self._read_beside(reader)
        return reader

    def read_shared(self, factory: Callable[..., Any]) -> ObjectReader:
        """Return what has read what the code of all of it names, and that of a factory.

        An object that the model has as an attribute, too, goes by its name in the process.
        """
        reader = self._reader(packages={package_of(factory)})
        read_factory(reader, factory)
        recipe = self._recipe
        for each in (*recipe.model.modules(), *recipe.losses, *members_of(recipe.optimizer)):
            reader.meet(type(each))
        reader.read_code()
        return reader

    def read_beside(self) -> ObjectReader:
        """Return what has read all but what the model holds."""
        reader = self._reader()
        self._read_beside(reader)
        return reader

    def _read_beside(self, reader: ObjectReader) -> None:
        recipe = self._recipe
        losses = recipe.losses
        for number, loss in enumerate(losses):
            which = f"loss {number}" if len(losses) > 1 else "the loss"
            if isinstance(loss, nn.Module):
                _read_loss(reader, which, loss)
            else:
                reader.read(f"a value of {which}", loss)
        reader.read("a value of the collate", recipe.collate)
        reader.read("a value of the training_step", recipe.training_step)
        functions = {n: each for n, each in (recipe.decode or {}).items() if callable(each)}
        if functions:
            reader.read("a value of decode", functions)
        reader.read(f"a value{OF_SCHEDULER}", recipe.lr_scheduler)
        reader.read_code()

    def read_plain(self) -> ObjectReader:
        """Return what has read the numbers, texts and None among the model's attributes.

        That takes no time.
        """
        reader = self._reader()
        for place, module in self._recipe.model.named_modules():
            for name, value in _own_attributes(module):
                if type(value) in PLAIN:
                    reader.read(f"attribute {name!r} of {self._told(place)}", value)
        return reader

    def attributes(self, names: Collection[str]) -> Iterator[tuple[nn.Module, str, str]]:
        """Yield the modules that have attributes of these names, as readings have them, or may."""
        for place, module in self._recipe.model.named_modules():
            end = f" of {self._told(place)}"
            for name in names:
                if name.startswith("attribute ") and name.endswith(end):
                    yield module, name[len("attribute ") : -len(end)].strip("'"), name

    def hooks(self, names: Collection[str]) -> Iterator[tuple[nn.Module, str]]:
        """Yield the modules that have hooks of these names, as readings have them."""
        for place, module in self._recipe.model.named_modules():
            for attribute in _HOOKS:
                if _hooks_told(attribute, self._told(place)) in names:
                    yield module, attribute

    def stand_in(self, names: Collection[str], kind: type[SetByTraining]) -> None:
        """Let attributes of these names be nothing to compute with, also those not set yet."""
        for module, attribute, name in self.attributes(names):
            vars(module)[attribute] = kind(name)

    def read_metrics(self) -> Reading:
        """Return what the metrics hold."""
        reader = self._reader()
        self._read_metrics(reader)
        reader.read_code()
        return reader.found

    def _read_metrics(self, reader: ObjectReader) -> None:
        for metric in self._recipe.metric_list:
            reader.read(f"a value{OF_METRIC}{metric.name!r}", metric.function)

    def read_optimizer(self, optimizer: torch.optim.Optimizer) -> Reading:
        """Return what an optimizer holds beside its param groups and state, its hooks as well."""
        reader = self._reader(optimizer)
        _read_optimizer(reader, optimizer)
        reader.read_code()
        return reader.found

    def read_scheduler(self, scheduler: Any | None) -> Reading:
        """Return what an LR scheduler's functions hold, and objects that its state leaves out."""
        found = _nested(schedulers_of(scheduler))
        leaves = {id(each): "the LR scheduler" for each in found}
        for each in (getattr(each, "optimizer", None) for each in found):
            if isinstance(each, torch.optim.Optimizer):
                whole, groups, state = THE_OPTIMIZER
                leaves |= {id(each): whole, id(each.param_groups): groups, id(each.state): state}
        reader = self._reader(leaves=leaves)
        for number, each in enumerate(found):
            which = f"{number} " if number else ""
            told, state = f"{OF_SCHEDULER} {which}({type(each).__name__})", each.state_dict()
            for name, value in tuple(vars(each).items()):
                parts = [
                    part
                    for part in (value if isinstance(value, list | tuple) else [value])
                    if isinstance(part, _FUNCTIONS)
                    or (name not in state and type(part).__module__ != "builtins")
                ]
                if parts:
                    reader.read(f"attribute {name!r}{told}", parts)
        reader.read_code()
        return reader.found

    def _reader(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        leaves: Mapping[int, str] = MappingProxyType({}),
        packages: Collection[str] = (),
    ) -> ObjectReader:
        """Return a reader of what refers to the model and its optimizer, or to a copy of this."""
        model, leaves = self._recipe.model, dict(leaves)
        both = (self._recipe.optimizer, optimizer or self._recipe.optimizer)
        for each in (each for of_one in both for each in (of_one, *members_of(of_one))):
            whole, groups, state = THE_OPTIMIZER
            leaves |= {id(each): whole, id(each.param_groups): groups, id(each.state): state}
        for place, module in model.named_modules():
            leaves[id(module)] = f"module {place!r}"
            prefix = f"{place}." if place else ""
            for name in module._parameters:
                if (own := self._parameters.get(prefix + name)) is not None:
                    leaves.setdefault(id(own), f"parameter {prefix + name!r}")
            for name, buffer in module._buffers.items():
                if prefix + name in self._hopping:
                    leaves.setdefault(id(buffer), f"buffer {prefix + name!r}")
        leaves.pop(id(None), None)
        addresses = {number: f"the id of {told}" for number, told in leaves.items()}
        for name, tensor in (*self._parameters.items(), *model.named_buffers()):
            if tensor.layout is torch.strided and (address := tensor.data_ptr()):
                addresses[address] = f"the address of {name!r}"
        return ObjectReader(leaves, self._packages.union(packages), addresses)

    def _told(self, place: str) -> str:
        return f"module {place!r}" if place else self._root

    def _read_model(self, reader: ObjectReader) -> None:
        model, seen = self._recipe.model, set()
        for place, module in model.named_modules(remove_duplicate=False):
            told = self._told(place)
            if id(module) in seen:
                reader.read(f"the object that is {told}", module)
                continue
            seen.add(id(module))
            kind = type(module)
            reader.meet(kind)
            reader.found[f"the class of {told}"] = f"{kind.__module__}.{kind.__qualname__}"
            self._read_tensors(reader, f"{place}." if place else "", module)
            for name, value in _own_attributes(module):
                if name in _HOOKS:
                    _read_hooks(reader, _hooks_told(name, told), value)
                else:
                    reader.read(f"attribute {name!r} of {told}", value)

    def _read_tensors(self, reader: ObjectReader, prefix: str, module: nn.Module) -> None:
        for name, parameter in tuple(module._parameters.items()):
            told = f"parameter {prefix + name!r}"
            if parameter is None or parameter is not self._parameters.get(prefix + name):
                reader.read(told, parameter)
                continue
            reader.found[told] = ""
            for attribute, value in _attributes_of(parameter):
                reader.read(f"attribute {attribute!r} of {told}", value)
            for kind in _HOOKS_OF_GRADIENTS:
                if hooks := getattr(parameter, kind, None):
                    reader.read(f"{OF_GRADIENT_HOOKS}{prefix + name!r}", list(hooks.values()))
        for name, buffer in tuple(module._buffers.items()):
            if prefix + name in self._hopping:
                reader.found[f"buffer {prefix + name!r}"] = ""
                for attribute, value in _attributes_of(buffer):
                    reader.read(f"attribute {attribute!r} of buffer {prefix + name!r}", value)
            elif buffer is not None or prefix + name not in self._built:
                made = "" if prefix + name in self._built else MADE
                reader.read(f"buffer {prefix + name!r}{made}", buffer)


def _read_optimizer(reader: ObjectReader, optimizer: torch.optim.Optimizer) -> None:
    for number, each in enumerate(members_of(optimizer)):
        kind = type(each).__name__
        told = kind if each is optimizer else f"{number} ({kind})"
        for name, value in tuple(vars(each).items()):
            if name in _HOOKS_OF_STEPS:
                when = name.removeprefix("_optimizer_").removesuffix("_hooks").replace("_", " ")
                _read_hooks(reader, f"{OF_HOOKS} {when} hook{OF_OPTIMIZER}{told}", value)
            elif name not in NOT_CLONED and not name.startswith("_optimizer_"):
                reader.read(f"attribute {name!r}{OF_OPTIMIZER}{told}", value)
        reader.meet(type(each))


def _nested(schedulers: Sequence[Any]) -> list[Any]:
    """Return LR schedulers, and those that they hold."""
    found = list(schedulers)
    for each in found:
        for value in vars(each).values():
            parts = value if isinstance(value, list | tuple) else [value]
            found += [p for p in parts if isinstance(p, LRScheduler) and p not in found]
    return found


def _attributes_of(tensor: Tensor | None) -> list[tuple[str, Any]]:
    """Return what was set on a tensor, but not what `nn.Buffer` and torch's compiler note there."""
    attributes = tuple(getattr(tensor, "__dict__", {}).items())
    noted = _OF_BUFFER if any(name == "_is_buffer" for name, _ in attributes) else ()
    return [(n, v) for n, v in attributes if not n.startswith("_dynamo_") and n not in noted]


def _read_loss(reader: ObjectReader, which: str, loss: nn.Module) -> None:
    for place, module in loss.named_modules():
        prefix = f"{place}." if place else ""
        reader.meet(type(module))
        for name, value in _own_attributes(module):
            if name not in _HOOKS:
                reader.read(path := f"attribute {prefix + name!r} of {which}", value)
                reader.variables[path] = Variable(vars(module), name)
            elif value:
                reader.read(f"attribute {prefix + name!r} of {which}", list(value.values()))
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                reader.read(f"{kind} {prefix + name!r} of {which}", tensor)


def _own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's attributes and slots, but not what its class computes and keeps."""
    computed = computed_attributes(type(module))  # type: ignore[arg-type]
    for name, value in tuple(vars(module).items()):
        if name == "forward" and _is_ours(value):
            continue  # that of a unit that runs compiled, or again in backward
        if name in _HOOKS or (name not in _OF_TORCH and name not in computed):
            yield name, value
    yield from slots_of(module)


def _hooks_told(attribute: str, of: str) -> str:
    when = attribute.strip("_").removesuffix("_hooks").replace("_", " ")
    return f"{OF_HOOKS} {when} hook of {of}"


def _read_hooks(reader: ObjectReader, name: str, hooks: Mapping[int, Any]) -> None:
    """Read the user's hooks."""
    if own := [hook for hook in hooks.values() if not _is_ours(hook)]:
        reader.read(name, own)


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__).startswith(f"{_OURS}.")


def read_factory(reader: ObjectReader, factory: Callable[..., Any]) -> None:
    """Let a reader meet a factory, and read the settings that it holds or closes over."""
    held = dict[str, Any]()
    while isinstance(factory, functools.partial):
        held |= {str(number): each for number, each in enumerate(factory.args)} | factory.keywords
        factory = factory.func
    if isinstance(factory, types.MethodType):
        held["__self__"], factory = factory.__self__, factory.__func__
    if isinstance(factory, types.FunctionType):
        reader.meet(factory)
        names = zip(factory.__code__.co_freevars, factory.__closure__ or (), strict=True)
        for name, cell in names:
            with suppress(ValueError):  # it is empty
                held[name] = cell.cell_contents
        held |= {f"default {n}": each for n, each in enumerate(factory.__defaults__ or ())}
        held |= factory.__kwdefaults__ or {}
    else:
        held["self"] = factory
        reader.meet(type(factory))
    path = f"{OF_GLOBAL}{getattr(factory, '__qualname__', '')!r} of {factory.__module__}"
    for name, value in held.items():
        if isinstance(value, types.FunctionType):
            reader.meet(value)
        elif are_settings(value):
            reader.read(f"{path}{PART}.{name}", value)
        elif is_own(type(value).__module__):
            for attribute, each in vars(value).items() if hasattr(value, "__dict__") else ():
                if are_settings(each):
                    reader.read(f"{path}{PART}.{name}{PART}.{attribute}", each)


def package_of(held: Any) -> str:
    """Return the package of an object's class, of a function its own."""
    while isinstance(held, functools.partial):
        held = held.func
    module = held.__module__ if hasattr(held, "__code__") else type(held).__module__
    return str(module).partition(".")[0]


def kept_by_optimizer(
    optimizer: torch.optim.Optimizer, changes: Collection[str]
) -> ConfigurationError | None:
    """Return the error of an optimizer that keeps tensors in attributes; None if none changed.

    Args:
        changes: marks of what the first steps changed; see `KnownChanges`.
    """
    kind = type(optimizer).__name__
    for name, value in vars(optimizer).items():
        held = value.values() if isinstance(value, Mapping) else value
        if not isinstance(held, Collection) or isinstance(held, str):
            held = [value]
        moves = any(name_of(m).startswith(f"attribute {name!r}{OF_OPTIMIZER}") for m in changes)
        if moves and any(isinstance(each, Tensor) for each in held):
            return ConfigurationError(
                f"optimizer {kind} keeps tensors that its steps change in its attribute {name!r}, "
                f"which hop with no shard; keep them in its state, as self.state[p][{name!r}]"
            )
    return None
